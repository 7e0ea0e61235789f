// How fast this instruction set multiplies and adds when nothing else is in the way: as many sums as
// the kernels hold, in registers. See peaks.h.

namespace eyas {
namespace {

// Makes the compiler believe that x may have changed, so that no product is taken out of a loop.
template <class T>
inline void touch(T& x) {
#if defined(EYAS_AVX2)
  asm("" : "+x"(x.v));
#elif !defined(EYAS_AVX512) && !defined(EYAS_NEON)  // whose dot products add: there is none to take
  asm("" : "+m"(x));
#else
  (void)x;
#endif
}

int64_t int8_peak(const uint8_t* bytes, int64_t iterations, float* sink) {
  constexpr int CHAINS = MAX_ROWS_INT8 * PARTS;
  B weights = load_bytes(bytes), x = broadcast4(reinterpret_cast<const int8_t*>(bytes));
  Dot<4> dots[CHAINS];
  for (int64_t i = 0; i < iterations; ++i) {
    const auto step = [&]<int STEP>() {
      for (int chain = 0; chain < CHAINS; ++chain) {
        touch(weights);
        dots[chain].template step<STEP>(weights, x);
      }
    };
    [&]<int... STEPS>(std::integer_sequence<int, STEPS...>) {
      (step.template operator()<STEPS>(), ...);
    }(std::make_integer_sequence<int, 8>());
  }
  F sum = zero();
  for (Dot<4>& dot : dots) sum = add(sum, to_float(dot.done()));
  *sink = sum_lanes(sum);
  return iterations * 8 * CHAINS * W * 4;
}

int64_t float_peak(const float* values, int64_t iterations, float* sink) {
  constexpr int CHAINS = MAX_ROWS_FLOAT * PARTS;
  const F a = load(values), b = load(values + W);
  F sums[CHAINS];
  for (F& sum : sums) sum = a;
  for (int64_t i = 0; i < iterations; ++i)
    for (F& sum : sums) sum = fma(sum, a, b);
  F total = zero();
  for (const F& sum : sums) total = add(total, sum);
  *sink = sum_lanes(total);
  return iterations * CHAINS * W;
}

}  // namespace
}  // namespace eyas

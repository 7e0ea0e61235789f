// What works on each row alone, at sizes that leave tails: each row against itself alone (in a call
// of one row, with other groups), and against double precision.
#include <algorithm>

#include "philox.h"
#include "top_k.h"
#include "weights.h"

namespace eyas::test {
namespace {

// Splits 0 .. size - 1 at a random place and runs both parts, the later one first.
template <class Function>
void in_two(Random& random, int64_t size, Function run) {
  const int64_t middle = random.between(0, size);
  run(middle, size);
  run(int64_t{0}, middle);
}

void check_same_quants(const QuantMatrix& a, const QuantMatrix& b, const std::string& what) {
  const auto same_info = [](const GroupInfo& x, const GroupInfo& y) {
    return std::memcmp(&x, &y, sizeof x) == 0;
  };
  if (a.data != b.data || !std::equal(a.info.begin(), a.info.end(), b.info.begin(), same_info))
    fail("%s: int8 values differ", what.c_str());
}

// One row's int8 values, from the definition.
void check_quants(const float* x, const QuantRows& q, int64_t size, const std::string& what) {
  for (int64_t g = 0; g < size / GROUP; ++g) {
    const GroupInfo& info = q.info[g];
    float largest = 0;
    int sums[2] = {};
    for (int k = 0; k < GROUP; ++k) {
      largest = std::max(largest, std::fabs(x[g * GROUP + k]));
      sums[k / (GROUP / 2)] += q.data[g * GROUP + k];
    }
    check_near(info.scale, largest / 127.0, 2 * UNIT_ROUNDOFF * static_cast<double>(largest), what);
    const double scale = info.scale;
    for (int k = 0; k < GROUP; ++k)
      check_near(x[g * GROUP + k], scale * q.data[g * GROUP + k], scale * 0.50001 + 1e-35, what);
    if (info.low_sum != sums[0] || info.high_sum != sums[1] ||
        info.offset != -128.0f * static_cast<float>(sums[0] + sums[1]))
      fail("%s: wrong sums of a group", what.c_str());
    check_near(info.sum, scale * (sums[0] + sums[1]), std::fabs(scale) * 0.001, what);
  }
}

void quantise_case(const KernelTable& table, Random& random) {
  const int64_t num_rows = random.between(1, 9), size = GROUP * random.between(1, 8);
  Matrix x(num_rows, size, random.between(0, 3));
  x.fill(random);
  QuantMatrix q(num_rows, size);
  in_two(random, num_rows, [&](int64_t begin, int64_t end) {
    table.quantise(x.view(), q.view(), size, begin, end);
  });
  for (int64_t row = 0; row < num_rows; ++row)
    check_quants(x.row(row), q.view(row), size, "quantise");

  float* group = x.row(0);
  group[random.between(0, GROUP - 1)] = random.pick({NAN, INFINITY, -INFINITY});
  table.quantise(x.view(), q.view(), size, 0, 1);
  if (!std::isnan(q.info[0].scale)) fail("quantise: NaN or infinity went unseen");
}

void norm_case(const KernelTable& table, Random& random) {
  const int64_t num_rows = random.between(1, 9), count = random.between(1, 4);
  const bool quantised = random.one_in(2);
  const int64_t size = quantised ? GROUP * random.between(1, 8) : random.between(1, 200);
  Matrix x(num_rows, count * size, random.between(0, 3));
  x.fill(random);
  Matrix out(num_rows, count * size, random.between(0, 3));
  QuantMatrix quant(quantised ? num_rows : 0, count * size);
  std::vector<float> weight(static_cast<size_t>(size));
  for (float& w : weight) w = random.value();
  NormArgs args{x.view(), out.view(), {}, weight.data(), size, count, 1e-5f};
  if (quantised) args.quant = quant.view();
  in_two(random, num_rows,
         [&](int64_t begin, int64_t end) { table.rms_norm(args, begin, end); });
  out.check_padding("rms_norm");
  for (int64_t row = 0; row < num_rows; ++row) {
    Matrix alone(1, count * size);
    alone.values.assign(x.row(row), x.row(row) + count * size);
    NormArgs one = args;
    one.x = one.out = alone.view();  // in place
    one.quant = {};
    table.rms_norm(one, 0, 1);
    check_same(out.row(row), alone.row(0), count * size, "rms_norm");
    if (quantised) check_quants(out.row(row), quant.view(row), count * size, "rms_norm");
    for (int64_t i = 0; i < count; ++i) {
      double squares = 0;
      for (int64_t k = 0; k < size; ++k) {
        const double v = x.row(row)[i * size + k];
        squares += v * v;
      }
      const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-5f);
      for (int64_t k = 0; k < size; ++k) {
        const double y = x.row(row)[i * size + k] * scale * weight[static_cast<size_t>(k)];
        const double bound = static_cast<double>(size + 16) * UNIT_ROUNDOFF * std::fabs(y);
        check_near(out.row(row)[i * size + k], y, bound, "rms_norm");
      }
    }
  }
}

void rope_case(const KernelTable& table, Random& random) {
  const int64_t num_rows = random.between(1, 9), heads = random.between(1, 4);
  const int64_t half = random.between(1, 70), head_dim = 2 * half;
  const bool interleaved = random.one_in(2);
  Matrix x(num_rows, heads * head_dim, random.between(0, 3));
  x.fill(random);
  Matrix cos(num_rows, half), sin(num_rows, half);
  for (int64_t i = 0; i < num_rows * half; ++i) {
    const double angle = 3.0 * random.value();
    cos.values[static_cast<size_t>(i)] = static_cast<float>(std::cos(angle));
    sin.values[static_cast<size_t>(i)] = static_cast<float>(std::sin(angle));
  }
  Matrix out(num_rows, heads * head_dim, random.between(0, 3));
  const RopeArgs args{x.view(),          out.view(),        heads,      head_dim,
                      cos.values.data(), sin.values.data(), interleaved};
  in_two(random, num_rows, [&](int64_t begin, int64_t end) { table.rope(args, begin, end); });
  out.check_padding("rope");
  Matrix in_place = x;
  RopeArgs same_rows = args;
  same_rows.x = same_rows.out = in_place.view();
  table.rope(same_rows, 0, num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    check_same(in_place.row(row), out.row(row), heads * head_dim, "rope in place");
    for (int64_t i = 0; i < heads * half; ++i) {
      const int64_t head = i / half * head_dim, j = i % half;
      const int64_t first = head + (interleaved ? 2 * j : j);
      const int64_t second = interleaved ? first + 1 : first + half;
      const double a = x.row(row)[first], b = x.row(row)[second];
      const double c = cos.row(row)[j], s = sin.row(row)[j];
      const double bound = 4 * UNIT_ROUNDOFF * (std::fabs(a) + std::fabs(b));
      check_near(out.row(row)[first], a * c - b * s, bound, "rope");
      check_near(out.row(row)[second], b * c + a * s, bound, "rope");
    }
  }
}

void silu_case(const KernelTable& table, Random& random) {
  const int64_t num_rows = random.between(1, 9);
  const bool quantised = random.one_in(2);
  const int64_t size = quantised ? GROUP * random.between(1, 8) : random.between(1, 200);
  Matrix x(num_rows, 2 * size, random.between(0, 3));
  x.fill(random);
  Matrix out(num_rows, size, random.between(0, 3));
  QuantMatrix quant(quantised ? num_rows : 0, size), whole_quant(quantised ? num_rows : 0, size);
  GateArgs args{x.view(), out.view(), {}, size};
  if (quantised) args.quant = quant.view();
  const int64_t groups = (size + GROUP - 1) / GROUP;
  in_two(random, num_rows, [&](int64_t begin, int64_t end) {
    in_two(random, groups,
           [&](int64_t first, int64_t last) { table.silu_mul(args, begin, end, first, last); });
  });
  out.check_padding("silu_mul");
  for (int64_t row = 0; row < num_rows; ++row) {
    std::vector<float> alone(x.row(row), x.row(row) + 2 * size);
    GateArgs one{{alone.data(), 2 * size}, {alone.data(), 2 * size}, {}, size};  // in place
    if (quantised) one.quant = whole_quant.view(row);
    table.silu_mul(one, 0, 1, 0, groups);
    check_same(out.row(row), alone.data(), size, "silu_mul");
    for (int64_t i = 0; i < size; ++i) {
      const double gate = x.row(row)[i], up = x.row(row)[size + i];
      const double y = gate / (1 + std::exp(-gate)) * up;
      // Where e^-gate is held at e^88 the result is as good as 0.
      const double bound = 16 * UNIT_ROUNDOFF * std::fabs(y) + 1e-35 * std::fabs(gate * up);
      check_near(out.row(row)[i], y, bound, "silu_mul");
    }
  }
  check_same_quants(quant, whole_quant, "silu_mul");
}

void add_case(const KernelTable& table, Random& random) {
  const int64_t num_rows = random.between(1, 9), size = random.between(1, 100);
  Matrix x(num_rows, size, random.between(0, 3)), y(num_rows, size, random.between(0, 3));
  x.fill(random);
  y.fill(random);
  Matrix out(num_rows, size, random.between(0, 3));
  in_two(random, num_rows, [&](int64_t begin, int64_t end) {
    table.add(x.view(), y.view(), out.view(), size, begin, end);
  });
  out.check_padding("add");
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < size; ++i)
      if (!same(out.row(row)[i], x.row(row)[i] + y.row(row)[i])) fail("add: wrong sum");
}

void embed_case(const KernelTable& table, Random& random, Format format) {
  const int64_t block = block_inputs(format);
  const int64_t size = block * random.between(1, block == 1 ? 100 : 4);
  const int64_t vocabulary = random.between(1, 60), num_rows = random.between(1, 9);
  const TestWeight w(random, format, vocabulary, size, false);
  std::vector<int64_t> ids(static_cast<size_t>(num_rows));
  for (int64_t& id : ids) id = random.between(0, vocabulary - 1);
  Matrix out(num_rows, size, random.between(0, 3));
  in_two(random, num_rows, [&](int64_t begin, int64_t end) {
    table.embed(w.weight, ids.data(), out.view(), begin, end);
  });
  out.check_padding("embed");
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t k = 0; k < size; ++k) {
      const auto at = static_cast<size_t>(ids[static_cast<size_t>(row)] * size + k);
      const double bound = is_quantised(format) ? 4 * UNIT_ROUNDOFF * w.magnitudes[at] : 0;
      check_near(out.row(row)[k], w.values[at], bound, std::string("embed ") + name_of(format));
    }
}

void best_index_case(const KernelTable& table, Random& random) {
  std::vector<float> x(static_cast<size_t>(random.between(1, 100)));
  const float scale = random.one_in(2) ? 4.0f : 1e6f;  // few values: many are equal
  for (float& v : x) v = std::round(random.value() * scale) - (random.one_in(3) ? 2e6f : 0.0f);
  const auto size = static_cast<int64_t>(x.size());
  if (table.best_index(x.data(), size) != std::max_element(x.begin(), x.end()) - x.begin())
    fail("best_index: not the first of the greatest");
  x[static_cast<size_t>(random.between(0, size - 1))] = random.pick({NAN, INFINITY, -INFINITY});
  if (table.best_index(x.data(), size) != -1) fail("best_index: NaN or infinity went unseen");
}

void top_k_case(Random& random) {
  std::vector<float> x(static_cast<size_t>(random.between(1, random.one_in(2) ? 100 : 5000)));
  const float scale = random.one_in(2) ? 4.0f : 1e6f;
  for (float& v : x) v = random.one_in(9) ? -INFINITY : std::round(random.value() * scale);
  const auto size = static_cast<int64_t>(x.size());
  const int64_t k = random.between(0, random.one_in(2) ? size : std::min<int64_t>(size, 40));
  std::vector<int64_t> found(static_cast<size_t>(k)), order(x.size());
  top_k(x.data(), size, k, found.data());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  if (found != order) fail("top_k: not the greatest %lld", static_cast<long long>(k));
}

// Integers: every table gives what the baseline gives, and a list of ids what all ids give.
void philox_case(const KernelTable& table, Random& random) {
  const KernelTable* const* baseline = kernel_tables();
  while (baseline[1]) ++baseline;
  const NoiseStream stream{random.bits(), static_cast<uint32_t>(random.bits()),
                           static_cast<uint32_t>(random.bits()), 1};
  const int64_t num_ids = random.between(1, 1000);
  const auto size = static_cast<size_t>(num_ids);
  std::vector<int64_t> ids(size), bits(size), loud_ids(size), loud(size);
  for (size_t i = 0; i < size; ++i) ids[i] = static_cast<int64_t>(i);
  random.shuffle(ids);
  random_bits(**baseline, stream, ids.data(), num_ids, bits.data());
  const uint32_t floor = static_cast<uint32_t>(random.bits()) | 1u << 31;
  const int64_t found =
      loud_bits(table, stream, num_ids, floor, loud_ids.data(), loud.data());
  int64_t expected = 0;
  for (size_t i = 0; i < size; ++i) {
    if (bits[i] >> 20 < static_cast<int64_t>(floor)) continue;
    ++expected;
    const auto end = loud_ids.begin() + found;
    const auto place = std::find(loud_ids.begin(), end, ids[i]);
    if (place == end || loud[static_cast<size_t>(place - loud_ids.begin())] != bits[i])
      fail("philox: another number for id %lld", static_cast<long long>(ids[i]));
  }
  if (found != expected) fail("philox: too many numbers");
}

}  // namespace

void test_rowwise(const KernelTable& table, Run run) {
  Random& random = run.random;
  for (int i = 0; i < 40 * run.effort; ++i) {
    quantise_case(table, random);
    norm_case(table, random);
    rope_case(table, random);
    silu_case(table, random);
    add_case(table, random);
    best_index_case(table, random);
    top_k_case(random);
    philox_case(table, random);
  }
  for (const Format format : FORMATS)
    for (int i = 0; i < 4 * run.effort; ++i) embed_case(table, random, format);
  std::vector<uint8_t> bytes(ALIGN, 1);
  std::vector<float> values(2 * TILE, 0.5f);
  float sink;
  if (table.int8_peak(bytes.data(), 3, &sink) <= 0 || table.float_peak(values.data(), 3, &sink) <= 0)
    fail("peaks: nothing was multiplied");
}

}  // namespace eyas::test

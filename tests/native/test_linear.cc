// Linear layers in every format: each row against itself alone, and against double precision.
#include "weights.h"

namespace eyas::test {
namespace {

struct Case {
  Format format;
  bool quantised;
  int64_t num_rows, num_outputs, num_inputs;
};

// All rows, the tiles in random ranges and order.
void run_in_ranges(const KernelTable& table, Random& random, const LinearArgs& args) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t begin = 0; begin < args.weight->num_tiles();) {
    const int64_t end = random.between(begin + 1, args.weight->num_tiles());
    ranges.emplace_back(begin, end);
    begin = end;
  }
  random.shuffle(ranges);
  for (const auto& [begin, end] : ranges) table.linear(args, begin, end);
}

void check_row(const TestWeight& w, const Case& c, const std::vector<double>& x, const float* before,
               const float* out, const std::string& what) {
  const int64_t additions = c.quantised ? 6 * c.num_inputs / GROUP : 2 * c.num_inputs;
  for (int64_t n = 0; n < c.num_outputs; ++n) {
    double sum = 0, size = 0;
    for (int64_t k = 0; k < c.num_inputs; ++k) {
      const auto at = static_cast<size_t>(n * c.num_inputs + k);
      sum += w.values[at] * x[static_cast<size_t>(k)];
      size += w.magnitudes[at] * std::fabs(x[static_cast<size_t>(k)]);
    }
    for (const double term : {w.bias.empty() ? 0.0 : static_cast<double>(w.bias[n]),
                              before ? static_cast<double>(before[n]) : 0.0}) {
      sum += term;
      size += std::fabs(term);
    }
    check_near(out[n], sum, static_cast<double>(additions + 16) * UNIT_ROUNDOFF * size, what);
  }
}

void run_case(const KernelTable& table, Random& random, const Case& c) {
  const std::string what = std::string(name_of(c.format)) + (c.quantised ? " int8 " : " float ") +
                           std::to_string(c.num_rows) + " x " + std::to_string(c.num_outputs) +
                           " x " + std::to_string(c.num_inputs);
  const TestWeight w(random, c.format, c.num_outputs, c.num_inputs, random.one_in(2));
  Matrix x(c.num_rows, c.num_inputs, random.between(0, 3));
  x.fill(random);
  const int64_t bad = random.one_in(4) ? random.between(0, c.num_rows - 1) : -1;
  if (bad >= 0)
    x.row(bad)[random.between(0, c.num_inputs - 1)] = random.one_in(2) ? NAN : INFINITY;
  QuantMatrix xq(c.quantised ? c.num_rows : 0, c.num_inputs);
  if (c.quantised) table.quantise(x.view(), xq.view(), c.num_inputs, 0, c.num_rows);

  Matrix before(c.num_rows, c.num_outputs, random.between(0, 3));
  before.fill(random);
  LinearArgs args{};
  args.weight = &w.weight;
  args.quantised = c.quantised;
  args.accumulate = random.one_in(2);
  if (c.quantised)
    args.xq = xq.view();
  else
    args.x = x.view();
  args.num_rows = c.num_rows;
  Matrix all = before;
  args.out = all.view();
  run_in_ranges(table, random, args);
  all.check_padding(what);

  for (int64_t row = 0; row < c.num_rows; ++row) {
    std::vector<float> own_x(x.row(row), x.row(row) + c.num_inputs);
    Matrix alone(1, c.num_outputs);
    alone.values.assign(before.row(row), before.row(row) + c.num_outputs);
    LinearArgs one = args;
    one.x = {own_x.data(), c.num_inputs};
    if (c.quantised) one.xq = xq.view(row);
    one.out = alone.view();
    one.num_rows = 1;
    table.linear(one, 0, w.weight.num_tiles());
    check_same(all.row(row), alone.row(0), c.num_outputs, what + ", row " + std::to_string(row));
    if (row == bad) {
      for (float y : alone.values)
        if (std::isfinite(y)) fail("%s: NaN or infinity went unseen", what.c_str());
      continue;
    }
    if (row > 1 && row != c.num_rows - 1) continue;
    std::vector<double> inputs(own_x.begin(), own_x.end());
    if (c.quantised)
      for (int64_t k = 0; k < c.num_inputs; ++k)
        inputs[static_cast<size_t>(k)] =
            static_cast<double>(one.xq.info[k / GROUP].scale) * one.xq.data[k];
    check_row(w, c, inputs, args.accumulate ? before.row(row) : nullptr, alone.row(0), what);
  }
}

void refuse_infinite(Random& random) {
  for (const Format format : FORMATS) {
    const int64_t inputs = block_inputs(format);
    std::vector<uint8_t> row(static_cast<size_t>(row_bytes(format, inputs)), 0);
    const size_t at = format == Format::F32 ? 2 : format == Format::Q6_K ? 208 : 0;
    const uint16_t bits = format == Format::F32 || format == Format::BF16
                              ? random.pick<uint16_t>({0x7f80, 0x7fc0, 0xff80})
                              : random.pick<uint16_t>({0x7c00, 0x7e00, 0xfc00});
    row[at] = static_cast<uint8_t>(bits);
    row[at + 1] = static_cast<uint8_t>(bits >> 8);
    const uint8_t* rows[] = {row.data()};
    std::vector<uint8_t> panel(static_cast<size_t>(panel_bytes(format, inputs)));
    if (pack_panel(format, inputs, rows, 1, panel.data()))
      fail("%s: a weight that is not finite went unseen", name_of(format));
  }
}

}  // namespace

void test_linear(const KernelTable& table, Run run) {
  Random& random = run.random;
  refuse_infinite(random);
  for (const Format format : FORMATS) {
    const int64_t block = block_inputs(format);
    for (int i = 0; i < 6 * run.effort; ++i) {
      const int64_t inputs = block * random.between(1, block == 1 ? 150 : block == 32 ? 12 : 4);
      for (const bool quantised : {false, true})
        if (!quantised || is_quantised(format))
          run_case(table, random,
                   {format, quantised, random.between(1, random.one_in(2) ? 9 : 70),
                    random.between(1, 70), inputs});
    }
    // Long rows: several blocks of rows.
    run_case(table, random, {format, false, 33, 19, 8192});
    if (is_quantised(format)) run_case(table, random, {format, true, 70, 19, 8192});
  }
}

}  // namespace eyas::test

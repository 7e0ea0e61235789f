// Random weights in every format, with their values as the formats define them.
#pragma once

#include <vector>

#include "check.h"
#include "pack.h"

namespace eyas::test {

constexpr Format FORMATS[] = {Format::F32,  Format::F16,  Format::BF16, Format::Q4_0,
                              Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0,
                              Format::Q4_K, Format::Q5_K, Format::Q6_K};
const char* name_of(Format format);
inline bool is_quantised(Format format) { return format >= Format::Q4_0; }

double half_value(uint16_t bits);
double bfloat_value(uint16_t bits);
uint16_t random_half(Random& random);  // finite

// A stored row's values, and for each the sum of the magnitudes that make it up.
void dequantise(Format format, const uint8_t* row, int64_t num_inputs, double* values,
                double* magnitudes);

struct TestWeight {
  TestWeight(Random& random, Format format, int64_t num_outputs, int64_t num_inputs,
             bool with_bias);
  TestWeight(const TestWeight&) = delete;
  Weight weight;
  std::vector<uint8_t> panels;
  std::vector<float> bias;
  std::vector<double> values, magnitudes;  // [N, K]
};

}  // namespace eyas::test

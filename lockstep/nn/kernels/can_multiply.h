// SPDX-License-Identifier: Apache-2.0
// Whether libtorch multiplies matrices of a type on a device, and how fast. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace lockstep::nn {

// Tried out, the first time: some builds promise a type and throw from matrices of 17 rows on.
bool can_multiply(at::ScalarType type, c10::Device device);

// 1e9 operations per second in products of two n x n matrices of ones, measured for about `seconds`
// after one product that is not counted. Throws what libtorch throws, and Error for a wrong result.
double multiply_rate(int64_t n, at::ScalarType type, c10::Device device, double seconds);

// Layers per second, forward and backward, measured in the same way: a norm and an MLP, `width`
// wide, of 128 rows. Types with fast products may be slow in all else.
double layer_rate(int64_t width, at::ScalarType type, c10::Device device, double seconds);

// "2.5 times the time of float32", from two rates; empty where a type is about as fast or faster.
std::string slower_than_float32(double rate, double float32_rate);

}  // namespace lockstep::nn

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/kernels/can_multiply.h"

#include <gtest/gtest.h>

#include "tests/support/says.h"

namespace lockstep::nn {
namespace {

using test::says;

TEST(CanMultiply, ATypeIsSlowWhenItTakesAQuarterMoreTimeThanFloat32) {
  EXPECT_THAT(slower_than_float32(10, 62), says("6.2 times ... float32"));
  EXPECT_THAT(slower_than_float32(80, 101), says("1.26 times ... float32"));
  EXPECT_EQ(slower_than_float32(100, 120), "");
  EXPECT_EQ(slower_than_float32(500, 100), "");
}

TEST(CanMultiply, RatesAreOfTheDeviceAndType) {
  EXPECT_GT(multiply_rate(64, at::kFloat, at::kCPU, 0), 0);
  EXPECT_GT(multiply_rate(64, at::kDouble, at::kCPU, 0), 0);
  EXPECT_GT(layer_rate(64, at::kFloat, at::kCPU, 0), 0);
}

}  // namespace
}  // namespace lockstep::nn

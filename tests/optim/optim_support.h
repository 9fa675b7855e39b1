// SPDX-License-Identifier: Apache-2.0
// What the tests of optimizers share.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/optim/optimizer.h"
#include "tests/support/says.h"

namespace lockstep::optim {

// Within `tolerance` of one, or of the value where that is larger.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected,
                         double tolerance = 1e-6) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  const at::Tensor a = actual.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  const at::Tensor error = (a - b).abs() / b.abs().clamp_min(1);
  EXPECT_TRUE(error.le(tolerance).all().item<bool>()) << "largest error " << error.max();
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

inline at::Tensor parameter(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::randn(shape).to(dtype).requires_grad_();
}

inline at::Tensor copy_of(const at::Tensor& parameter) {
  return parameter.detach().clone().requires_grad_();
}

inline std::vector<NamedParameter> named(const std::vector<at::Tensor>& tensors) {
  std::vector<NamedParameter> parameters;
  for (const at::Tensor& tensor : tensors) {
    parameters.push_back({"p" + std::to_string(parameters.size()), tensor});
  }
  return parameters;
}

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(copy_of(tensor));
  return copies;
}

// The same new gradients for two lists of parameters.
inline void set_grads(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor gradient = at::randn(a[i].sizes());
    a[i].mutable_grad() = gradient.to(a[i].scalar_type());
    b[i].mutable_grad() = gradient.to(a[i].scalar_type()).to(b[i].scalar_type());
  }
}

// Shapes around the sizes of vectors and blocks.
inline std::vector<at::Tensor> parameters_of_many_sizes(at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> tensors;
  for (const int64_t size : {1, 3, 8, 17, 0, 16384, 16385, 40000}) {
    tensors.push_back(parameter({size}, dtype));
  }
  tensors.push_back(parameter({}, dtype));
  tensors.push_back(parameter({3, 5, 7}, dtype));
  return tensors;
}

inline at::Tensor entry(const std::vector<NamedTensor>& state, const std::string& name) {
  for (const NamedTensor& tensor : state) {
    if (tensor.name == name) return tensor.tensor;
  }
  ADD_FAILURE() << "no entry " << name;
  return {};
}

template <class Exception, class Body>
void expect_error(const std::string& part, Body body) {
  try {
    body();
    ADD_FAILURE() << "no error; expected: " << part;
  } catch (const Exception& error) {
    EXPECT_THAT(error.what(), test::says(part));
  }
}

}  // namespace lockstep::optim

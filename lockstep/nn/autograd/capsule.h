// SPDX-License-Identifier: Apache-2.0
// Values of any type in a backward's saved data, where only tensors and a few others have a type of
// their own. Private: not installed.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <string>
#include <utility>

namespace lockstep::nn {

template <class T>
struct Capsule : torch::CustomClassHolder {
  explicit Capsule(T value) : value(std::move(value)) {}
  T value;
};

template <class T>
void save_value(torch::autograd::AutogradContext& context, const std::string& name, T value) {
  context.saved_data[name] =
      at::IValue::make_capsule(c10::make_intrusive<Capsule<T>>(std::move(value)));
}

template <class T>
T saved_value(torch::autograd::AutogradContext& context, const std::string& name) {
  return static_cast<const Capsule<T>&>(*context.saved_data[name].toCapsule()).value;
}

}  // namespace lockstep::nn

// SPDX-License-Identifier: Apache-2.0
// What a recording must know about torch's operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::parallel::detail {

using Arguments = std::vector<c10::IValue>;

std::string name_of(const c10::OperatorHandle& op);

// What a random operator draws.
struct Draw {
  enum class Kind : uint8_t { uniform, normal, other };
  Kind kind = Kind::other;
  double first = 0, second = 1;  // low and high, or mean and deviation
};
// Nothing for an operator that draws no random numbers.
std::optional<Draw> draw_of(const c10::OperatorHandle& op, const Arguments& arguments);

bool is_written(const c10::OperatorHandle& op, size_t argument);
// Whether nothing is left of what was in the storage of a tensor that the operator writes to.
bool fills_storage(const c10::OperatorHandle& op, const at::Tensor& tensor);
// Its result, or its result's shape, depends on what is in its arguments and is no tensor.
bool needs_values(const c10::OperatorHandle& op);
// Makes a tensor of sizes that it is told.
bool is_factory(const c10::OperatorHandle& op, const Arguments& arguments);
// Makes a tensor and leaves its memory as it is.
bool is_uninitialised(const c10::OperatorHandle& op);

// The device argument; nothing where the operator has none or it is left open.
std::optional<c10::Device> device_of(const c10::OperatorHandle& op, const Arguments& arguments);
// Points the operator to a device, where it has an argument for one.
void set_device(const c10::OperatorHandle& op, Arguments& arguments, c10::Device device);

}  // namespace lockstep::parallel::detail

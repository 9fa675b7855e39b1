// SPDX-License-Identifier: Apache-2.0
// Models that are built without memory for their large tensors.
//
//   auto model = parallel::materialize(parallel::deferred([] { return Net(8192); }), {.seed = 1});
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/nn/init_model.h"

namespace lockstep::parallel {

struct MaterializeOptions {
  uint64_t seed = 0;
  c10::Device device = c10::Device(c10::kCPU);
  // Asked first, for every parameter, with its memory.
  nn::InitializeRule rule = {};
};

namespace detail {

class Recording;

// Calls the function, which makes a model and returns it, with the operators of this thread
// recorded.
std::shared_ptr<Recording> record(const std::function<const torch::nn::Module&()>& make);

void materialize(torch::nn::Module& model, const Recording& recording,
                 const MaterializeOptions& options);

}  // namespace detail

// A model, some of whose tensors have neither memory nor values, and how they are to come by them.
template <class Model>
struct Deferred {
  Model model;
  std::shared_ptr<detail::Recording> recording;
};

// Calls `make`, which returns a module's holder or a shared_ptr to a module. While it runs, tensors
// of more than one dimension and 64 KiB get no memory, and nothing random is drawn: what operators
// would have done to such tensors is recorded. Smaller constants are as ever. What a constructor
// cannot do: ask for the values of such tensors or of random ones, and write to them by pointer.
// Uninitialised memory is zero. Throws ConfigError for an operator that must have values, and if
// called inside another such call.
template <class Make>
auto deferred(Make make) {
  using Model = std::invoke_result_t<Make&>;
  std::optional<Model> model;
  auto recording = detail::record([&]() -> const torch::nn::Module& {
    model.emplace(make());
    return **model;
  });
  return Deferred<Model>{std::move(*model), std::move(recording)};
}

// Gives the model's tensors, also those that are plain members, memory on the device and the values
// that construction gives them. Random ones are functions of (seed, name, index), as
// nn::initialize() draws them; torch's generators are not used. Parameters stay the same tensors.
// Throws ConfigError where a tensor depends on a random operator other than uniform and normal.
template <class Model>
Model materialize(Deferred<Model> deferred, const MaterializeOptions& options = {}) {
  detail::materialize(*deferred.model, *deferred.recording, options);
  return std::move(deferred.model);
}

}  // namespace lockstep::parallel

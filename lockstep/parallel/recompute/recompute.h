// SPDX-License-Identifier: Apache-2.0
// Activations that are computed again instead of kept.
//
//   x = parallel::recompute([=](const at::Tensor& x) { return block(x); }, x);
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ranges>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/core/torch_fwd.h"
#include "lockstep/memory/disk_store.h"
#include "lockstep/mesh/model_parallel_context.h"
#include "lockstep/nn/random/random_context.h"

namespace lockstep::parallel {

namespace detail {
class StoredInputs;
}

// Where the inputs of functions are kept, in place of memory:
//   auto store = std::make_shared<parallel::ActivationStore>("/scratch");
//   x = parallel::recompute(block, x, {.store = store});
// Tensors are on disk between forward and backward, one store for all functions of a rank. They are
// read ahead of use: in the order of the step before and, where there is none, last in first out.
// A wrong guess costs time, nothing else. Thread safe.
class ActivationStore {
 public:
  // Without a folder, tensors of a GPU are in pinned host memory; others stay where they are.
  ActivationStore() = default;
  // ConfigError unless a file can be made in `folder`. The file has no name: nothing is left.
  explicit ActivationStore(const std::string& folder, memory::DiskStoreOptions options = {});

  // Of the disk.
  memory::DiskStoreStats stats() const { return disk_ ? disk_->stats() : memory::DiskStoreStats{}; }

 private:
  friend class detail::StoredInputs;

  int64_t add(detail::StoredInputs* inputs);
  void remove(int64_t number);
  void read_ahead(int64_t number);
  // What will be wanted after `number`, if all goes as before.
  std::optional<int64_t> guess(int64_t number) const;

  std::optional<memory::DiskStore> disk_;
  std::mutex mutex_;
  // Numbered as they are put; from 0 again when all are gone, so that those of equal steps have
  // equal numbers.
  std::map<int64_t, detail::StoredInputs*> kept_;
  int64_t next_ = 0;
  std::optional<int64_t> last_wanted_;
  std::unordered_map<int64_t, int64_t> after_;  // wanted one after the other
};

struct RecomputeOptions {
  // What the random layers in the function share. It is set back to what it was in the first call
  // while the function is called again.
  std::shared_ptr<nn::RandomContext> random = {};
  // Where the inputs of the function are stored until it is called again; none: in
  // memory.
  std::shared_ptr<ActivationStore> store = {};
  // Results of matrix products, convolutions and attention are kept in memory, and everything else
  // is computed again: selective recomputation, by operator, for any function. Attention that drops
  // elements is computed again.
  bool keep_products = false;
  // Modules whose buffers the function writes to, such as running statistics: the second call
  // leaves them as it finds them.
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};
};

namespace detail {

// While it lives, what autograd would keep on this thread is only counted.
class RecomputeScope {
 public:
  using Tensors = std::vector<at::Tensor>;

  RecomputeScope(std::function<void(const Tensors& inputs)> again, const Tensors& inputs,
                 RecomputeOptions options);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  struct Active;
  std::unique_ptr<Active> active_;
};

// While it lives, what autograd would keep on this thread is kept in the store, but for parameters
// and buffers of the modules and for what is too small to gain.
class StoreScope {
 public:
  StoreScope(std::shared_ptr<ActivationStore> store,
             const std::vector<std::shared_ptr<torch::nn::Module>>& modules);
  ~StoreScope();
  StoreScope(const StoreScope&) = delete;
  StoreScope& operator=(const StoreScope&) = delete;

 private:
  bool active_;
};

}  // namespace detail

// Calls the function with the inputs and returns what it returns. Of what autograd would keep for
// backward nothing is kept but the inputs, and what the function itself holds. When backward comes
// to it, the function is called once more, up to the last thing that it must give, with torch's
// random generators, autocast and the random context as they were. It must compute the same again.
// Backward is not re-entered, so hooks on gradients fire once, and gradients of inputs that need
// none are no special case. Without grad mode it is a plain call. Not for functions that are in
// turn differentiated twice.
template <std::invocable<const std::vector<at::Tensor>&> Function>
auto recompute(Function function, const std::vector<at::Tensor>& inputs,
               RecomputeOptions options = {}) {
  const detail::RecomputeScope scope(
      [function](const std::vector<at::Tensor>& again) mutable {
        static_cast<void>(function(again));
      },
      inputs, std::move(options));
  return function(inputs);
}

// The same with one input.
template <std::invocable<const at::Tensor&> Function>
auto recompute(Function function, const at::Tensor& input, RecomputeOptions options = {}) {
  const detail::RecomputeScope scope(
      [function](const std::vector<at::Tensor>& again) mutable {
        static_cast<void>(function(again[0]));
      },
      {input}, std::move(options));
  return function(input);
}

// The same for a function that holds its inputs, in memory: capture them by value.
template <std::invocable<> Function>
auto recompute(Function function, RecomputeOptions options = {}) {
  const detail::RecomputeScope scope(
      [function](const std::vector<at::Tensor>&) mutable { static_cast<void>(function()); }, {},
      std::move(options));
  return function();
}

// Runs layers one after the other and returns what the last one gives. Where the context's
// gradient_checkpointing is on, each goes through recompute(), so that of its activations only the
// input is kept. Layers are functions of a tensor, module holders, pointers to modules, or the
// torch::nn::AnyModules of a Sequential: run_layers(context, *sequential, x).
template <std::ranges::input_range Layers>
at::Tensor run_layers(const mesh::ModelParallelContext& context, Layers&& layers, at::Tensor x,
                      const RecomputeOptions& options = {}) {
  for (auto layer : layers) {
    auto run = [layer](const at::Tensor& input) mutable -> at::Tensor {
      if constexpr (std::is_invocable_v<decltype(layer)&, const at::Tensor&>) {
        return layer(input);
      } else if constexpr (requires { layer->forward(input); }) {
        return layer->forward(input);
      } else {
        return layer.forward(input);
      }
    };
    x = context.config().gradient_checkpointing ? recompute(std::move(run), x, options) : run(x);
  }
  return x;
}

struct TileOptions {
  int64_t dim = 1, size = 1;                       // parts of at most so many along this dimension
  std::shared_ptr<nn::RandomContext> random = {};  // as RecomputeOptions::random
};

using TileFunction = std::function<at::Tensor(const at::Tensor& part, int64_t begin)>;

// What the function gives for each part and where it begins, put together along the dimension. The
// parts must be independent of each other. Of what autograd would keep nothing is kept but x, and
// in a function that is recomputed not even that: backward calls the function again for one part
// after the other, so that the activations of one are in memory at a time.
at::Tensor in_tiles(const TileFunction& function, const at::Tensor& x, const TileOptions& options);

}  // namespace lockstep::parallel

// SPDX-License-Identifier: Apache-2.0
// Data parallelism over the ranks of a group: every rank trains its own copy of the model on its
// own data, and backward leaves the same averaged gradients everywhere.
//
//   auto ddp = parallel::ddp(*model, group);
//   auto loss = torch::nn::functional::cross_entropy(ddp.forward(input), target);
//   loss.backward();    // gradients are averaged while it runs
//   optimizer.step();
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel {

struct DdpAdvancedOptions {
  size_t first_bucket_bytes = size_t{1} << 20;  // small, so that communication begins early
  bool gradient_as_bucket_view = true;  // off: gradients have memory of their own, copied twice
  bool delay_all_reduce = false;        // begin to reduce when backward is done
};

struct DdpOptions {
  size_t bucket_bytes = size_t{25} << 20;
  // Some parameters may get no gradient in a step. Where only some ranks have one, all get the
  // average, counting zeros; where no rank has one, an undefined gradient stays undefined.
  bool find_unused_parameters = false;
  // Every step uses the same parameters equally often. Learned in the first step; allows a
  // parameter to get its gradient in several parts (recomputed blocks that share it).
  bool static_graph = false;
  bool broadcast_buffers = true;  // rank 0's, before each forward in training mode
  // Ranks may run out of data at different times: see join(). Costs one small all-reduce per
  // forward (with buffers) and backward.
  bool uneven_inputs = false;
  // Sum (rank, micro-batch) as one fixed binary tree: the same bits for 1, 2, 4, 8 ... ranks that
  // share the same micro-batches. Between backward passes under no_sync the gradients are kept in
  // log2(accumulation) extra buffers, and are not in .grad(); zero_grad() does not drop them.
  bool reproducible = false;
  // Parameters whose gradients are sparse, beside the weights of Embedding and EmbeddingBag modules
  // with sparse(true), which are found. Only non-zero rows travel. Others are made dense.
  std::vector<std::string> sparse_parameters = {};
  GradientHook hook = {};  // empty: average in the parameter's dtype
  DdpAdvancedOptions advanced = {};
};

struct BucketInfo {
  size_t bytes = 0;
  std::vector<std::string> parameters = {};
};

namespace detail {

class Ddp;

// The tensors in what a forward returned: a tensor, or tuples and ranges of such.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    found.push_back(value);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... item) { (collect_tensors(item, found), ...); }, value);
  } else if constexpr (requires { value.begin() != value.end(); }) {
    for (const auto& item : value) collect_tensors(item, found);
  }
}

// A module holder, or a pointer to a module.
template <class Model>
concept LeadsToModule = requires(Model model) {
  *model;
};

}  // namespace detail

// While one is alive, backward passes accumulate gradients on this rank and do not communicate.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<detail::Ddp> ddp);
  ~NoSync();
  NoSync(NoSync&&) = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  std::shared_ptr<detail::Ddp> ddp_;
};

// What does not depend on the model's type. A value: copies share everything.
class DdpHandle {
 public:
  DdpHandle(torch::nn::Module& model, const comm::Group& group, DdpOptions options);

  NoSync no_sync() { return NoSync(ddp_); }
  // Which micro-batch of the step the next backward is of, where they do not come in order (a
  // pipeline); none: the next. Matters to the sum of reproducible mode.
  void set_micro_batch(std::optional<int64_t> index);
  // Averages what is in the gradients now, as the end of a backward would: for gradients that were
  // accumulated under no_sync or put there by hand. Does nothing in eval mode. Collective.
  void sync_gradients();
  // For a rank that has no more data (option uneven_inputs): takes part in the other ranks' steps
  // without adding to them, until all ranks are here; then gives all the weights of the last to
  // train. `step` (e.g. optimizer.step) is called after each of the others' backward passes, with
  // the averaged gradients in place, so that optimizer state keeps up.
  void join(const std::function<void()>& step = {});

  const comm::Group& group() const;
  int rank() const { return group().rank(); }
  int world_size() const { return group().size(); }
  const DdpOptions& options() const;
  // The devices that hold parameters.
  std::vector<c10::Device> devices() const;
  // How gradients are grouped now; empty on a group of one.
  std::vector<BucketInfo> buckets() const;

 protected:
  // As sync_gradients(), in any mode.
  void reduce_gradients();
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);

 private:
  std::shared_ptr<detail::Ddp> ddp_;
};

// Model is a std::shared_ptr to a module, or a module holder (torch::nn::Sequential, your
// TORCH_MODULE).
template <class Model>
class DistributedDataParallel : public DdpHandle {
 public:
  DistributedDataParallel(Model model, const comm::Group& group, DdpOptions options)
      : DdpHandle(*model, group, std::move(options)), model_(std::move(model)) {}

  // Calls the model's own forward.
  template <class... Args>
  auto forward(Args&&... args) {
    before_forward();
    auto output = model_->forward(std::forward<Args>(args)...);
    std::vector<at::Tensor> outputs;
    detail::collect_tensors(output, outputs);
    after_forward(outputs);
    return output;
  }

  Model& module() { return model_; }

 private:
  Model model_;
};

// Makes all ranks' models equal to rank 0's, and returns the wrapper to train with. Pass a module
// (*model), its holder, or a std::shared_ptr to it. Collective. Nothing is installed on a group of
// one, unless reproducible.
template <std::derived_from<torch::nn::Module> Module>
DistributedDataParallel<std::shared_ptr<Module>> ddp(Module& model, const comm::Group& group,
                                                     DdpOptions options = {}) {
  return {{model.weak_from_this().lock(), &model}, group, std::move(options)};
}
template <detail::LeadsToModule Model>
DistributedDataParallel<Model> ddp(Model model, const comm::Group& group, DdpOptions options = {}) {
  return {std::move(model), group, std::move(options)};
}

// The CUDA device for this rank, by its place on the host, or the CPU where there is none.
c10::Device detected_device(const comm::Group& group);

// The same with the model moved to detected_device(group) first.
template <std::derived_from<torch::nn::Module> Module>
DistributedDataParallel<std::shared_ptr<Module>> ddp_on_detected_device(Module& model,
                                                                        const comm::Group& group,
                                                                        DdpOptions options = {}) {
  model.to(detected_device(group));
  return ddp(model, group, std::move(options));
}
template <detail::LeadsToModule Model>
DistributedDataParallel<Model> ddp_on_detected_device(Model model, const comm::Group& group,
                                                      DdpOptions options = {}) {
  model->to(detected_device(group));
  return {std::move(model), group, std::move(options)};
}

}  // namespace lockstep::parallel

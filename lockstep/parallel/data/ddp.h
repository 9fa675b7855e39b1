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

#include <algorithm>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel {

struct DdpAdvancedOptions {
  // Small, so that communication begins early; at most bucket_bytes.
  size_t first_bucket_bytes = size_t{1} << 20;
  bool gradient_as_bucket_view = true;  // off: gradients have memory of their own, copied twice
  bool delay_all_reduce = false;        // begin to reduce when backward is done
  GradientObserver observe = {};        // of dense gradients; empty: none
};

struct DdpOptions {
  size_t bucket_bytes = size_t{25} << 20;  // set_bucket_size() changes it later
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
  // Parameters whose gradients are sparse, in addition to the weights of Embedding and EmbeddingBag
  // modules with sparse(true), which are found. Only non-zero rows travel. Others are made dense.
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
class Reducer;

// The tensors in what a forward takes or returns: a tensor, or tuples, optionals and ranges of
// such.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& found) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    found.push_back(value);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... item) { (collect_tensors(item, found), ...); }, value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) collect_tensors(*value, found);
  } else if constexpr (requires { value.begin() != value.end(); }) {
    for (const auto& item : value) collect_tensors(item, found);
  }
}

// Whether a copy of such a value can have its tensors on another device. Views (spans, ArrayRef)
// are someone else's tensors.
template <class T>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return true;
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    return []<size_t... I>(std::index_sequence<I...>) {
      return (holds_tensors<std::tuple_element_t<I, T>>() || ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (requires(T & value) {
                         value.has_value();
                         *value;
                       }) {
    return holds_tensors<std::remove_reference_t<decltype(*std::declval<T&>())>>();
  } else if constexpr (std::ranges::range<T> && !std::ranges::view<T> && !std::is_array_v<T>) {
    using Item = std::remove_reference_t<std::ranges::range_reference_t<T>>;
    return !std::is_same_v<std::remove_const_t<Item>, T> && holds_tensors<Item>();
  } else {
    return false;
  }
}

template <class T>
void move_tensors(T& value, c10::Device device) {
  if constexpr (!holds_tensors<T>()) {
    return;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) value = value.to(device);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](auto&... item) { (move_tensors(item, device), ...); }, value);
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) move_tensors(*value, device);
  } else {
    for (auto& item : value) move_tensors(item, device);
  }
}

// An argument of a forward, of the type that a forwarding reference has: itself or, where a tensor
// in it is on another device than the model, a copy whose tensors are on the model's.
template <class T>
class Placed {
 public:
  using Value = std::remove_cvref_t<T>;

  Placed(T&& value, std::optional<c10::Device> device) : value_(value) {
    if constexpr (holds_tensors<Value>()) {
      std::vector<at::Tensor> tensors;
      collect_tensors(value, tensors);
      const auto elsewhere = [&](const at::Tensor& tensor) {
        return device && tensor.defined() && tensor.device() != *device;
      };
      if (std::none_of(tensors.begin(), tensors.end(), elsewhere)) return;
      copy_.emplace(value);
      move_tensors(*copy_, *device);
    }
  }

  T&& get() {
    if constexpr (holds_tensors<Value>()) {
      if (copy_) return static_cast<T&&>(*copy_);
    }
    return static_cast<T&&>(value_);
  }

 private:
  std::remove_reference_t<T>& value_;
  std::conditional_t<holds_tensors<Value>(), std::optional<Value>, std::nullopt_t> copy_{
      std::nullopt};
};

// A parameter that several modules have once, under its first name. torch lists it for each of
// them, and an optimizer of such a list steps it as often.
template <class Named>
Named listed_once(const Named& parameters) {
  Named once;
  std::unordered_set<const void*> seen;
  for (const auto& item : parameters) {
    if (!item.value().defined() || seen.insert(item.value().unsafeGetTensorImpl()).second)
      once.insert(item.key(), item.value());
  }
  return once;
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

  // Bytes of a bucket from the next backward on; gradients that are being accumulated stay. The
  // same on all ranks, or all throw ConfigError. Collective; not during a backward.
  void set_bucket_size(size_t bytes);
  // Clears the model's gradients, with what reproducible mode has accumulated under no_sync.
  void zero_grad();
  // Moves the model with its gradients, and the buckets. An optimizer's state stays where it is.
  // Collective; not during a backward.
  void to(c10::Device device);

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
  // Null on a group of one, unless it is reproducible.
  detail::Reducer* reducer() const;
  // The device of all parameters and buffers; none, if they are on several or there are none.
  std::optional<c10::Device> input_device() const;
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

  // Calls the model's own forward, with tensors on the model's device: arguments that are tensors,
  // or tuples, optionals and containers of tensors, are copied there where they are elsewhere. A
  // model on several devices gets them as they are.
  template <class... Args>
  auto forward(Args&&... args) {
    const std::optional<c10::Device> device = input_device();
    before_forward();
    auto output = model_->forward(detail::Placed<Args>(std::forward<Args>(args), device).get()...);
    std::vector<at::Tensor> outputs;
    detail::collect_tensors(output, outputs);
    after_forward(outputs);
    return output;
  }

  Model& module() { return model_; }
  // Those of the model, each parameter once.
  void train(bool on = true) { model_->train(on); }
  void eval() { model_->eval(); }
  bool is_training() const { return model_->is_training(); }
  auto named_parameters() const { return detail::listed_once(model_->named_parameters()); }
  auto parameters() const { return named_parameters().values(); }

 private:
  Model model_;
};

// Makes all ranks' models equal to rank 0's, and returns the wrapper to train with. Pass a module
// (*model), its holder, or a std::shared_ptr to it. Collective. On a group of one nothing is
// averaged; the check for unused parameters is made there, too.
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

// This rank's entry of a list of the devices of a host, the same for all hosts: entry i is for the
// i-th rank of the group on its host. ConfigError on all ranks where a host has more ranks than the
// list has devices. Collective.
c10::Device device_among(const std::vector<c10::Device>& devices, const comm::Group& group);

// The same as ddp() with the model moved to detected_device(group) first.
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

// The same with the model moved to device_among(devices, group) first. Collective.
template <std::derived_from<torch::nn::Module> Module>
DistributedDataParallel<std::shared_ptr<Module>> ddp_on_devices(
    Module& model, const comm::Group& group, const std::vector<c10::Device>& devices,
    DdpOptions options = {}) {
  model.to(device_among(devices, group));
  return ddp(model, group, std::move(options));
}
template <detail::LeadsToModule Model>
DistributedDataParallel<Model> ddp_on_devices(Model model, const comm::Group& group,
                                              const std::vector<c10::Device>& devices,
                                              DdpOptions options = {}) {
  model->to(device_among(devices, group));
  return {std::move(model), group, std::move(options)};
}

}  // namespace lockstep::parallel

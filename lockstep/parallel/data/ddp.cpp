// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/ddp.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/cuda.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <set>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/missing_peer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/reducer.h"
#include "lockstep/parallel/data/same_model.h"

namespace lockstep::parallel::detail {
namespace {

NamedTensors list(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  NamedTensors named;
  for (const auto& item : tensors) {
    if (item.value().defined()) named.emplace_back(item.key(), item.value());
  }
  return named;
}

// Names of the parameters whose gradients torch makes sparse.
std::set<std::string> sparse_weights(torch::nn::Module& model) {
  std::set<std::string> names;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    const std::string prefix = item.key().empty() ? "" : item.key() + ".";
    const auto* embedding = item.value()->as<torch::nn::EmbeddingImpl>();
    const auto* bag = item.value()->as<torch::nn::EmbeddingBagImpl>();
    if ((embedding && embedding->options.sparse()) || (bag && bag->options.sparse()))
      names.insert(prefix + "weight");
  }
  return names;
}

void check_options(const DdpOptions& options, const NamedTensors& parameters) {
  if (options.bucket_bytes == 0 || options.advanced.first_bucket_bytes == 0) {
    throw ConfigError(
        format("[ddp] bucket_bytes is {} and first_bucket_bytes is {}, both must be at least 1",
               options.bucket_bytes, options.advanced.first_bucket_bytes));
  }
  if (options.reproducible && options.hook) {
    throw ConfigError(
        "[ddp] reproducible and a gradient hook are both set; a hook has a sum of its own, so give "
        "one of them");
  }
  if (options.static_graph && options.find_unused_parameters) {
    throw ConfigError(
        "[ddp] static_graph and find_unused_parameters are both set; static_graph finds them in "
        "the first step, so give one of them");
  }
  for (const std::string& name : options.sparse_parameters) {
    if (std::none_of(parameters.begin(), parameters.end(),
                     [&](auto& p) { return p.first == name; }))
      throw ConfigError(
          format("[ddp] sparse_parameters has {}, which the model does not have", name));
  }
}

}  // namespace

class Ddp {
 public:
  Ddp(torch::nn::Module& model, const comm::Group& group, DdpOptions options)
      : model_(model.weak_from_this().lock(), &model), group_(group), options_(std::move(options)) {
    const NamedTensors parameters = list(model.named_parameters());
    check_options(options_, parameters);
    buffers_ = list(model.named_buffers());
    NamedTensors all = parameters;
    all.insert(all.end(), buffers_.begin(), buffers_.end());
    for (const auto& [name, tensor] : all) tensors_.push_back(tensor);
    if (group_.size() == 1 && !options_.reproducible) {
      check_usage(parameters);
      return;
    }
    // Of its own, so that collectives of the user, or of layers in backward, do not mix with ours.
    private_group_ = group_.size() == 1 ? group_ : group_.split(0, group_.rank());
    check_same_model("ddp", all, private_group_);
    check_same_strides("ddp", parameters, private_group_);
    check_own_devices("ddp", parameters, private_group_);
    if (options_.reproducible) check_same_threads("ddp", private_group_);
    broadcast_tensors(all, private_group_, 0);

    std::set<std::string> sparse = sparse_weights(model);
    sparse.insert(options_.sparse_parameters.begin(), options_.sparse_parameters.end());
    std::set<const void*> sparse_tensors, seen;
    for (const auto& [name, tensor] : parameters) {
      if (sparse.count(name) > 0) sparse_tensors.insert(tensor.unsafeGetTensorImpl());
    }
    std::vector<Parameter> trained, frozen;
    for (const auto& [name, tensor] : parameters) {
      // Tied weights have several names and one gradient.
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      if (!tensor.requires_grad()) {
        frozen.push_back({.name = name, .tensor = tensor});
        continue;
      }
      // Sums of rows have no fixed tree: reproducible mode makes them dense.
      const bool is_sparse =
          !options_.reproducible && sparse_tensors.count(tensor.unsafeGetTensorImpl()) > 0;
      trained.push_back({.name = name, .tensor = tensor, .sparse = is_sparse});
    }
    reducer_ =
        std::make_shared<Reducer>(std::move(trained), std::move(frozen), private_group_, options_);
    reducer_->start();
  }

  // Nothing is averaged on a group of one, but what would fail on several ranks fails there.
  void check_usage(const NamedTensors& parameters) {
    if (options_.find_unused_parameters || options_.static_graph) return;
    std::set<const void*> seen;
    std::vector<Parameter> trained;
    for (const auto& [name, tensor] : parameters) {
      if (tensor.requires_grad() && seen.insert(tensor.unsafeGetTensorImpl()).second)
        trained.push_back({.name = name, .tensor = tensor});
    }
    usage_ = std::make_shared<UsageCheck>(std::move(trained));
  }

  void before_forward() {
    if (!reducer_) return;
    if (no_sync_ > 0 || !model_->is_training() || !at::GradMode::is_enabled()) return;
    if (!options_.broadcast_buffers || buffers_.empty() || group_.size() == 1) return;
    const int root = options_.uneven_inputs ? reducer_->take_part(Activity::buffers).leader : 0;
    comm::with_peer_hint(options_.uneven_inputs ? kJoin : kUnevenInputs,
                         [&] { broadcast_tensors(buffers_, private_group_, root); });
  }

  void after_forward(const std::vector<at::Tensor>& outputs) {
    if ((!reducer_ && !usage_) || !at::GradMode::is_enabled()) return;
    if (usage_) usage_->start();  // a pipeline's stages, which do not come here, use what they like
    // The gradient of an output comes first, and on the outermost graph: blocks that recompute run
    // graphs of their own, whose end is not the end of backward.
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.grad_fn()) {
        output.register_hook(
            [weak = std::weak_ptr(reducer_), usage = std::weak_ptr(usage_)](const at::Tensor&) {
              // autograd::grad() does not touch parameters' gradients, unless it is asked for them.
              const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
              if (wanted && !wanted->empty()) return;
              if (const auto reducer = weak.lock()) reducer->begin_backward();
              if (const auto check = usage.lock()) check->begin_backward();
            });
      }
    }
  }

  void change_no_sync(int change) {
    no_sync_ += change;
    if (reducer_) reducer_->set_syncing(no_sync_ == 0);
    if (usage_) usage_->set_syncing(no_sync_ == 0);
  }

  std::optional<c10::Device> input_device() const {
    if (tensors_.empty()) return std::nullopt;
    const c10::Device device = tensors_[0].device();
    for (const at::Tensor& tensor : tensors_) {
      if (tensor.device() != device) return std::nullopt;
    }
    return device;
  }

  void set_bucket_size(size_t bytes) {
    if (reducer_) {
      announce_layout("set_bucket_size");
      lay_out_again(bytes, std::nullopt);
    } else {
      options_.bucket_bytes = agree_on_bucket_size(bytes, comm::Group());
    }
  }

  void zero_grad() {
    model_->zero_grad();
    if (reducer_) reducer_->drop_accumulated();
    if (usage_) usage_->drop_accumulated();
  }

  void to(c10::Device device) {
    device = at::empty({0}, at::TensorOptions(device)).device();  // "cuda" is the current GPU
    if (reducer_) {
      announce_layout("to");
      lay_out_again(options_.bucket_bytes, device);
    } else {
      move_model(device);
      if (usage_) usage_->restart();
    }
  }

  void announce_layout(const char* operation) {
    reducer_->check_between_rounds(operation);
    if (options_.uneven_inputs && group_.size() > 1) reducer_->take_part(Activity::layout);
  }

  // A rank that has no more data follows the others' size, and stays where it is.
  void lay_out_again(std::optional<size_t> bytes, std::optional<c10::Device> device) {
    const size_t agreed = agree_on_bucket_size(bytes, private_group_);
    if (!tensors_.empty())
      check_own_devices("ddp", device.value_or(tensors_[0].device()), private_group_);
    options_.bucket_bytes = agreed;
    if (device) {
      move_model(*device);
      reducer_->start();
    }
    reducer_->lay_out_again();
  }

  void move_model(c10::Device device) {
    const at::NoGradGuard no_grad;
    model_->to(device);
    for (const at::Tensor& parameter : model_->parameters()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (gradient.defined()) gradient = gradient.to(device);
    }
  }

  void sync_gradients() {
    if (!model_->is_training()) return;
    if (reducer_) reducer_->reduce_now();
    if (usage_) usage_->check_now();
  }

  void join(const std::function<void()>& step) {
    if (!options_.uneven_inputs) throw ConfigError("[ddp] join() needs the option uneven_inputs");
    if (group_.size() == 1) return;
    for (;;) {
      const Attendance attendance = reducer_->take_part(Activity::none);
      if (attendance.active == 0) break;
      if (attendance.activity == Activity::buffers) {
        broadcast_tensors(buffers_, private_group_, attendance.leader);
      } else if (attendance.activity == Activity::layout) {
        lay_out_again(std::nullopt, std::nullopt);
      } else {
        reducer_->shadow(attendance);
        if (step) step();
      }
    }
    NamedTensors all = list(model_->named_parameters());
    all.insert(all.end(), buffers_.begin(), buffers_.end());
    broadcast_tensors(all, private_group_, reducer_->leader());
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> devices;
    for (const at::Tensor& parameter : model_->parameters()) {
      if (std::find(devices.begin(), devices.end(), parameter.device()) == devices.end())
        devices.push_back(parameter.device());
    }
    return devices;
  }

  std::shared_ptr<torch::nn::Module> model_;
  comm::Group group_, private_group_;
  DdpOptions options_;
  NamedTensors buffers_;
  std::vector<at::Tensor> tensors_;  // all parameters and buffers
  int no_sync_ = 0;
  std::shared_ptr<Reducer> reducer_;   // none on a group of one
  std::shared_ptr<UsageCheck> usage_;  // on a group of one
};

}  // namespace lockstep::parallel::detail

namespace lockstep::parallel {

NoSync::NoSync(std::shared_ptr<detail::Ddp> ddp) : ddp_(std::move(ddp)) { ddp_->change_no_sync(1); }
NoSync::~NoSync() {
  if (ddp_) ddp_->change_no_sync(-1);
}

DdpHandle::DdpHandle(torch::nn::Module& model, const comm::Group& group, DdpOptions options)
    : ddp_(std::make_shared<detail::Ddp>(model, group, std::move(options))) {}
void DdpHandle::before_forward() { ddp_->before_forward(); }
detail::Reducer* DdpHandle::reducer() const { return ddp_->reducer_.get(); }
void DdpHandle::after_forward(const std::vector<at::Tensor>& outputs) {
  ddp_->after_forward(outputs);
}
void DdpHandle::set_micro_batch(std::optional<int64_t> index) {
  if (ddp_->reducer_) ddp_->reducer_->set_micro_batch(index);
}
void DdpHandle::reduce_gradients() {
  if (ddp_->reducer_) ddp_->reducer_->reduce_now();
}
void DdpHandle::sync_gradients() { ddp_->sync_gradients(); }
void DdpHandle::set_bucket_size(size_t bytes) { ddp_->set_bucket_size(bytes); }
void DdpHandle::zero_grad() { ddp_->zero_grad(); }
void DdpHandle::to(c10::Device device) { ddp_->to(device); }
std::optional<c10::Device> DdpHandle::input_device() const { return ddp_->input_device(); }
void DdpHandle::join(const std::function<void()>& step) { ddp_->join(step); }
const comm::Group& DdpHandle::group() const { return ddp_->group_; }
const DdpOptions& DdpHandle::options() const { return ddp_->options_; }
std::vector<c10::Device> DdpHandle::devices() const { return ddp_->devices(); }
std::vector<BucketInfo> DdpHandle::buckets() const {
  return ddp_->reducer_ ? ddp_->reducer_->bucket_infos() : std::vector<BucketInfo>();
}

c10::Device detected_device(const comm::Group& group) {
  const size_t count = torch::cuda::device_count();
  if (count == 0) return {at::kCPU};
  const size_t index = static_cast<size_t>(group.local_rank()) % count;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

c10::Device device_among(const std::vector<c10::Device>& devices, const comm::Group& group) {
  // Asked of all ranks, so that all of them refuse a list that is too short for one host.
  const at::Tensor most = at::full({1}, group.local_size(), at::kLong);
  comm::all_reduce(most, group, {.op = comm::ReduceOp::max, .tag = "ranks of a host"}).wait();
  if (most.item<int64_t>() > static_cast<int64_t>(devices.size())) {
    throw ConfigError(
        format("[ddp] the number of devices is {}, but a host has {} ranks of the group; list a "
               "device for each of them",
               devices.size(), most.item<int64_t>()));
  }
  return devices[static_cast<size_t>(group.local_rank())];
}

}  // namespace lockstep::parallel

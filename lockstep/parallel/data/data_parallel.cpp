// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/cuda.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/replica_pace.h"
#include "lockstep/parallel/data/replica_state.h"
#include "lockstep/parallel/data/replica_workers.h"

namespace lockstep::parallel {
namespace {

c10::Device with_index(c10::Device device) {
  if (!device.is_cpu() && !device.has_index()) device.set_index(0);
  return device;
}

std::vector<c10::Device> checked(std::vector<c10::Device> devices) {
  if (devices.empty())
    throw ConfigError("[DataParallel] the number of devices is 0, must be at least 1");
  for (c10::Device& device : devices) device = with_index(device);
  return devices;
}

// How many updates a step of `replicas` is made of, where they all take it together.
size_t updates_of_step(const SyncMode& mode, size_t replicas) {
  if (std::holds_alternative<Synchronous>(mode)) return 1;
  if (std::holds_alternative<Asynchronous>(mode)) return replicas;
  const auto late = static_cast<uint64_t>(std::get<BoundedStaleness>(mode).max);
  return static_cast<size_t>(std::min<uint64_t>(late, replicas - 1)) + 1;
}

}  // namespace

namespace detail {

class DataParallel {
 public:
  DataParallel(torch::nn::Module& model, DataParallelOptions options)
      : devices(checked(std::move(options.devices))), pace(devices.size(), options.mode) {
    model.to(devices[0]);
    replicas.emplace_back(
        std::shared_ptr<torch::nn::Module>(model.weak_from_this().lock(), &model));
    for (size_t i = 1; i < devices.size(); ++i) replicas.push_back(clone(replicas[0], devices[i]));
  }

  Replica& model() { return replicas[0]; }

  // Held while the replicas are at work.
  std::unique_lock<std::mutex> claim() {
    std::unique_lock lock(in_use_, std::try_to_lock);
    if (!lock) {
      throw ConfigError(
          "[DataParallel] replicas do one thing at a time: no forward, run or sync_gradients from "
          "within a step or an update, or from a second thread");
    }
    return lock;
  }

  // Calls `body` for the first `count` replicas, once they have the model's values. In two rounds:
  // the model's own forward may write into the buffers that the others copy.
  void for_each(size_t count, const std::function<void(size_t)>& body) {
    workers->run(count, [&](size_t i) {
      if (i == 0) return;
      copy_parameters(model(), replicas[i]);
      copy_buffers(model(), replicas[i]);
    });
    workers->run(count, body);
  }

  // Called by autograd when a backward comes to an output of forward(), or of replica `replica` in
  // forward_parallel().
  void in_backward_of_batch() { losses_ |= kOfBatch; }
  void in_backward_of_replica(size_t replica) {
    losses_ |= kOfReplicas;
    if (replica == 0) set_model_aside();
  }

  void reduce_gradients() {
    take_gradients(model(), pointers(0, replicas.size()), 1);
    add_gradients(model(), aside_);
    forget_backward();
  }

  void sync_gradients(const std::function<void()>& update) {
    const size_t updates = updates_of_step(pace.mode(), replicas.size());
    if (updates > 1 && !update) {
      throw ConfigError(
          format("[DataParallel::sync_gradients] the mode makes {} updates of a step of {} "
                 "replicas; give the function that updates the model, or use Synchronous",
                 updates, replicas.size()));
    }
    if (losses_ == (kOfBatch | kOfReplicas)) {
      throw ConfigError(
          "[DataParallel::sync_gradients] there are gradients of forward and of forward_parallel, "
          "which are added and averaged; call it after each, or zero_grad to drop them");
    }
    const bool average = losses_ == kOfReplicas;
    if (average) set_model_aside();
    for (size_t i = 0; i < updates; ++i) {
      const auto parts =
          pointers(i * replicas.size() / updates, (i + 1) * replicas.size() / updates);
      const auto has = [](const Replica* part) { return has_gradients(*part); };
      // Of a batch with fewer rows than replicas, some have none.
      if (i > 0 && std::none_of(parts.begin(), parts.end(), has)) continue;
      take_gradients(model(), parts, average ? 1.0 / static_cast<double>(parts.size()) : 1.0);
      add_gradients(model(), std::exchange(aside_, {}));
      if (update) update();
    }
    forget_backward();
  }

  // What is known of gradients that are not in the model yet.
  void forget_backward() {
    losses_ = 0;
    aside_.clear();
  }

  void zero_grad() {
    model().module->zero_grad();
    for (size_t i = 1; i < replicas.size(); ++i) clear_gradients(replicas[i]);
    forget_backward();
  }

  void to(c10::Device device) {
    device = with_index(device);
    if (std::any_of(devices.begin(), devices.end(),
                    [&](c10::Device d) { return d != devices[0]; })) {
      if (device == devices[0]) return;
      std::vector<std::string> names;
      for (const c10::Device d : devices) names.push_back(d.str());
      throw ConfigError(
          format("[DataParallel] to({}): the replicas are on {}; make a new wrapper for others",
                 device.str(), join(names)));
    }
    for (Replica& replica : replicas) move_to(replica, device);
    for (at::Tensor& gradient : aside_) {
      if (gradient.defined()) gradient = gradient.to(device);
    }
    devices.assign(devices.size(), device);
    workers = std::make_unique<ReplicaWorkers>(devices);
  }

  std::vector<c10::Device> devices;
  std::vector<Replica> replicas;  // the first is the model
  ReplicaPace pace;
  std::unique_ptr<ReplicaWorkers> workers = std::make_unique<ReplicaWorkers>(devices);

 private:
  static constexpr int kOfBatch = 1, kOfReplicas = 2;

  std::vector<Replica*> pointers(size_t begin, size_t end) {
    std::vector<Replica*> parts;
    for (size_t i = begin; i < end; ++i) parts.push_back(&replicas[i]);
    return parts;
  }

  // The model is a replica: what its gradients held before is no replica's, and not averaged.
  void set_model_aside() {
    if (aside_.empty()) aside_ = set_gradients_aside(model());
  }

  std::mutex in_use_;
  std::atomic<int> losses_ = 0;  // whose gradients the replicas have
  std::vector<at::Tensor> aside_;
};

// Calls back when a backward comes to the output. autograd::grad() does not touch parameters'
// gradients, unless it is asked for them.
void on_backward(at::Tensor& output, const std::shared_ptr<DataParallel>& parallel,
                 const std::function<void(DataParallel&)>& call) {
  if (!output.requires_grad()) return;
  if (output.is_leaf()) output = output.view_as(output);  // the hook is not to stay on it
  output.register_hook([weak = std::weak_ptr(parallel), call](const at::Tensor&) {
    const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
    if (wanted && !wanted->empty()) return;
    if (const auto still = weak.lock()) call(*still);
  });
}

}  // namespace detail

namespace {

using detail::Replica;

// One call of run(). The model is changed under an exclusive lock and copied under a shared one.
class ReplicaRun {
 public:
  ReplicaRun(detail::DataParallel& parallel, const detail::ReplicaStep& step,
             const std::function<void()>& update)
      : parallel_(parallel), pace_(parallel.pace), step_(step), update_(update) {
    for (Replica& replica : parallel_.replicas) working_.push_back(&replica);
    pace_.start();
    if (!pace_.synchronous()) stand_in_for_model();
  }

  ~ReplicaRun() {  // a step that failed leaves gradients
    for (Replica& replica : parallel_.replicas) {
      if (&replica != &parallel_.model()) clear_gradients(replica);
    }
  }
  ReplicaRun(const ReplicaRun&) = delete;
  ReplicaRun& operator=(const ReplicaRun&) = delete;

  void take_steps(size_t replica, int64_t steps) {
    try {
      for (int64_t step = 0; step < steps && pace_.begin(replica); ++step) take_step(replica, step);
    } catch (...) {
      pace_.stop();
      throw;
    }
  }

 private:
  void take_step(size_t replica, int64_t step) {
    Replica& mine = *working_[replica];
    if (&mine != &parallel_.model()) {
      const std::shared_lock reading(model_mutex_);
      copy_parameters(parallel_.model(), mine);
    }
    at::autocast::clear_cache();  // casts of parameters as they were
    clear_gradients(mine);
    const at::Tensor loss = step_(*mine.module, replica, step);
    if (!loss.defined() || loss.numel() != 1) {
      throw ConfigError(
          format("[DataParallel::run] replica {}, step {}: the loss has {} elements, must have 1",
                 replica, step, loss.defined() ? loss.numel() : 0));
    }
    loss.backward();
    if (const auto due = pace_.finish(replica); !due.empty()) apply(due);
  }

  void apply(const std::vector<size_t>& due) {
    {
      const std::unique_lock writing(model_mutex_);
      std::vector<Replica*> parts;
      for (const size_t i : due) parts.push_back(working_[i]);
      take_gradients(parallel_.model(), parts, 1.0 / static_cast<double>(due.size()));
      if (due[0] == 0 && parts[0] != &parallel_.model()) copy_buffers(*parts[0], parallel_.model());
      update_();
      if (due.size() == working_.size()) pace_.adopt_mode();
      if (!pace_.synchronous()) stand_in_for_model();
      for (const size_t i : due) {
        if (working_[i] != &parallel_.model()) copy_buffers(parallel_.model(), *working_[i]);
      }
    }
    pace_.applied(due);
  }

  // While replicas update the model when they like, replica 0 cannot compute on it.
  void stand_in_for_model() {
    if (working_.size() == 1 || working_[0] != &parallel_.model()) return;
    stand_in_ = clone(parallel_.model(), parallel_.devices[0]);
    working_[0] = &*stand_in_;
  }

  detail::DataParallel& parallel_;
  detail::ReplicaPace& pace_;
  const detail::ReplicaStep& step_;
  const std::function<void()>& update_;
  std::shared_mutex model_mutex_;
  std::optional<Replica> stand_in_;
  std::vector<Replica*> working_;  // what each replica computes on
};

}  // namespace

std::vector<c10::Device> detected_devices() {
  std::vector<c10::Device> devices;
  for (size_t i = 0; i < static_cast<size_t>(torch::cuda::device_count()); ++i) {
    devices.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(i));
  }
  if (devices.empty()) devices.emplace_back(at::kCPU);
  return devices;
}

DataParallelHandle::DataParallelHandle(torch::nn::Module& model, DataParallelOptions options)
    : replicas_(std::make_shared<detail::DataParallel>(model, std::move(options))) {}

at::Tensor DataParallelHandle::forward(std::vector<at::Tensor> batch,
                                       const detail::ReplicaForward& call) {
  std::vector<std::vector<at::Tensor>> parts;  // of each replica
  for (const at::Tensor& tensor : batch) {
    if (tensor.dim() == 0 || tensor.size(0) != batch[0].size(0)) {
      std::vector<std::string> shapes;
      for (const at::Tensor& t : batch) shapes.push_back(format("({})", join(t.sizes())));
      throw ConfigError(
          format("[DataParallel::forward] inputs are {}, must have the same size in dimension 0",
                 join(shapes)));
    }
    const auto chunks = tensor.chunk(static_cast<int64_t>(devices().size()));
    parts.resize(chunks.size());
    for (size_t i = 0; i < chunks.size(); ++i) parts[i].push_back(chunks[i]);
  }
  const auto claim = replicas_->claim();
  std::vector<at::Tensor> outputs(parts.size());
  replicas_->for_each(parts.size(), [&](size_t i) {
    for (at::Tensor& part : parts[i]) part = part.to(devices()[i]);
    outputs[i] = call(*replicas_->replicas[i].module, parts[i]);
  });
  for (at::Tensor& output : outputs) {
    output = output.to(devices()[0]);
    if (output.dim() == 0) output = output.unsqueeze(0);
  }
  at::Tensor output = at::cat(outputs);
  detail::on_backward(output, replicas_, [](auto& parallel) { parallel.in_backward_of_batch(); });
  return output;
}

std::vector<at::Tensor> DataParallelHandle::forward_parallel(const std::vector<at::Tensor>& inputs,
                                                             const detail::ReplicaForward& call) {
  if (inputs.size() != devices().size()) {
    throw ConfigError(
        format("[DataParallel::forward_parallel] the number of inputs is {}, must be {}, one for "
               "each device",
               inputs.size(), devices().size()));
  }
  const auto claim = replicas_->claim();
  std::vector<at::Tensor> outputs(inputs.size());
  replicas_->for_each(inputs.size(), [&](size_t i) {
    const at::Tensor input = inputs[i].to(devices()[i]);
    outputs[i] = call(*replicas_->replicas[i].module, {&input, 1});
  });
  for (size_t i = 0; i < outputs.size(); ++i) {
    detail::on_backward(outputs[i], replicas_,
                        [i](auto& parallel) { parallel.in_backward_of_replica(i); });
  }
  return outputs;
}

void DataParallelHandle::reduce_gradients() {
  const auto claim = replicas_->claim();
  replicas_->reduce_gradients();
}

void DataParallelHandle::sync_gradients(const std::function<void()>& update) {
  const auto claim = replicas_->claim();
  if (replicas_->model().module->is_training()) replicas_->sync_gradients(update);
}

void DataParallelHandle::zero_grad() {
  const auto claim = replicas_->claim();
  replicas_->zero_grad();
}

void DataParallelHandle::to(c10::Device device) {
  const auto claim = replicas_->claim();
  replicas_->to(device);
}

RunStats DataParallelHandle::run(int64_t steps, const detail::ReplicaStep& step,
                                 const std::function<void()>& update) {
  if (steps < 0)
    throw ConfigError(format("[DataParallel::run] steps is {}, must be at least 0", steps));
  const auto claim = replicas_->claim();
  replicas_->forget_backward();
  ReplicaRun run(*replicas_, step, update);
  replicas_->for_each(devices().size(), [&](size_t i) { run.take_steps(i, steps); });
  return stats();
}

const std::vector<c10::Device>& DataParallelHandle::devices() const { return replicas_->devices; }
SyncMode DataParallelHandle::mode() const { return replicas_->pace.mode(); }
void DataParallelHandle::set_mode(SyncMode mode) { replicas_->pace.set_mode(mode); }
RunStats DataParallelHandle::stats() const { return replicas_->pace.stats(); }

}  // namespace lockstep::parallel

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/cuda.h>
#include <torch/nn/module.h>

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

std::vector<c10::Device> checked(std::vector<c10::Device> devices) {
  if (devices.empty())
    throw ConfigError("[DataParallel] the number of devices is 0, must be at least 1");
  for (c10::Device& device : devices) {
    if (!device.is_cpu() && !device.has_index()) device.set_index(0);
  }
  return devices;
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
          "[DataParallel] replicas do one thing at a time: no forward or run from within a step, "
          "or from a second thread");
    }
    return lock;
  }

  // Calls `body` for the first `count` replicas, once they have the model's values. In two rounds:
  // the model's own forward may write into the buffers that the others copy.
  void for_each(size_t count, const std::function<void(size_t)>& body) {
    workers.run(count, [&](size_t i) {
      if (i == 0) return;
      copy_parameters(model(), replicas[i]);
      copy_buffers(model(), replicas[i]);
    });
    workers.run(count, body);
  }

  std::vector<c10::Device> devices;
  std::vector<Replica> replicas;  // the first is the model
  ReplicaPace pace;
  ReplicaWorkers workers{devices};

 private:
  std::mutex in_use_;
};

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
  return at::cat(outputs);
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
  return outputs;
}

void DataParallelHandle::reduce_gradients() {
  std::vector<Replica*> all;
  for (Replica& replica : replicas_->replicas) all.push_back(&replica);
  take_gradients(replicas_->model(), all, 1);
}

RunStats DataParallelHandle::run(int64_t steps, const detail::ReplicaStep& step,
                                 const std::function<void()>& update) {
  if (steps < 0)
    throw ConfigError(format("[DataParallel::run] steps is {}, must be at least 0", steps));
  const auto claim = replicas_->claim();
  ReplicaRun run(*replicas_, step, update);
  replicas_->for_each(devices().size(), [&](size_t i) { run.take_steps(i, steps); });
  return stats();
}

const std::vector<c10::Device>& DataParallelHandle::devices() const { return replicas_->devices; }
SyncMode DataParallelHandle::mode() const { return replicas_->pace.mode(); }
void DataParallelHandle::set_mode(SyncMode mode) { replicas_->pace.set_mode(mode); }
RunStats DataParallelHandle::stats() const { return replicas_->pace.stats(); }

}  // namespace lockstep::parallel

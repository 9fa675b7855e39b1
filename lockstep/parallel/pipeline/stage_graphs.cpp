// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/stage_graphs.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/parallel/data/reducer.h"

namespace lockstep::parallel::detail {
namespace {

// In these, buckets are laid out and kernels loaded.
constexpr int kEagerSteps = 2;
// Names with graphs: each has memory for its activations.
constexpr size_t kMostNames = 2;

std::vector<at::Tensor> trained(const Stage& stage) {
  std::vector<at::Tensor> parameters;
  for (const optim::NamedParameter& parameter : stage.named_parameters()) {
    if (parameter.tensor.requires_grad()) parameters.push_back(parameter.tensor);
  }
  return parameters;
}

const void* address(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

}  // namespace

void require_recordable(const PipelineOptions& options, const schedule::Program& program,
                        int tensor_ranks) {
  const auto* whole = std::get_if<DdpOptions>(&options.data);
  const auto refuse = [](const std::string& what) {
    throw ConfigError(
        format("[pipeline] graphs are wanted, but {}; set advanced.graphs none", what));
  };
  if (program.stages() != 1) refuse(format("there are {} stages", program.stages()));
  if (whole == nullptr) refuse("parameters are sharded");
  if (whole->reproducible) refuse("the options of data parallelism are reproducible");
  if (tensor_ranks > 1) refuse(format("{} ranks share matrices", tensor_ranks));
  const auto& actions = program.actions[0];
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].op == schedule::Op::forward && actions[i + 1].op != schedule::Op::backward) {
      refuse(format("schedule {} has other work between a forward and its backward",
                    layout::name_of(options.schedule)));
    }
  }
}

StageGraphs::StageGraphs(Stage& stage, c10::Device device, bool must)
    : stage_(stage),
      must_(must),
      parameters_(trained(stage)),
      recorder_(memory::make_graph_recorder(device)) {}

void StageGraphs::begin_step() {
  current_ = nullptr;
  repeated_.clear();
}

std::vector<const void*> StageGraphs::memory_now() const {
  std::vector<const void*> places;
  for (const at::Tensor& parameter : parameters_) {
    places.push_back(address(parameter));
    places.push_back(address(parameter.grad()));
  }
  return places;
}

std::vector<at::Tensor> StageGraphs::gradients() const {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : parameters_) all.push_back(parameter.grad());
  return all;
}

void StageGraphs::set_gradients(const std::vector<at::Tensor>& gradients) const {
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = gradients[i];
}

at::Tensor StageGraphs::forward(const std::string& name, int microbatch, const Tensors& inputs,
                                const Stage::Loss& loss, bool syncs) {
  current_ = nullptr;
  const std::string before = std::exchange(repeated_, "");
  if (!recorder_ || name.empty()) return {};
  const bool is_first = std::ranges::none_of(
      parameters_, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
  if (is_first ? ++steps_[name] <= kEagerSteps : before != name) return {};
  current_ = find(name, syncs);
  if (current_ == nullptr) {
    if (!has_place(name)) return {};
    if (!must_ && recordings_.empty() && !recorder_->has_room()) {
      recorder_.reset();
      log::info("graphs off: the device has less than twice the memory of a step's activations");
      return {};
    }
    if (is_first) {  // what is made of weights once in a step is a part of it
      for (const at::Tensor& parameter : parameters_)
        parameter.unsafeGetTensorImpl()->bump_version();
    }
    try {
      recordings_.push_back(
          std::make_unique<Recording>(record(name, microbatch, inputs, loss, syncs)));
    } catch (const std::exception& error) {
      recordings_.clear();
      recorder_.reset();
      const std::string why = format(
          "[pipeline] a micro-batch could not be recorded as CUDA "
          "graphs: {}",
          error.what());
      if (must_) throw Error(why);
      log::warn(why + "; steps continue without them");
      return {};
    }
    current_ = recordings_.back().get();
  }
  repeated_ = name;
  current_->forward->repeat();
  return current_->loss.clone();
}

const StageGraphs::Recording* StageGraphs::find(const std::string& name, bool syncs) const {
  const auto memory = memory_now();
  const auto found = std::ranges::find_if(recordings_, [&](const auto& recording) {
    return recording->name == name && recording->syncs == syncs && recording->memory == memory;
  });
  return found == recordings_.end() ? nullptr : found->get();
}

bool StageGraphs::has_place(const std::string& name) const {
  std::set<std::string> names{name};
  for (const auto& recording : recordings_) names.insert(recording->name);
  return names.size() <= kMostNames;
}

StageGraphs::Recording StageGraphs::record(const std::string& name, int microbatch,
                                           const Tensors& inputs, const Stage::Loss& loss,
                                           bool syncs) {
  Recording recording{.name = name, .syncs = syncs, .memory = memory_now()};
  const std::vector<at::Tensor> before = gradients();
  try {
    recorder_->begin();
    recording.loss = stage_.forward(microbatch, inputs, &loss)[0].detach();
    recording.forward = recorder_->end();
    record_backward(recording, microbatch);
    recording.gradients = gradients();
  } catch (...) {
    recorder_->abandon();
    stage_.drop(microbatch);
    set_gradients(before);
    throw;
  }
  set_gradients(before);
  return recording;
}

void StageGraphs::record_backward(Recording& recording, int microbatch) {
  Reducer* const reducer = recording.syncs ? stage_.reducer() : nullptr;
  bool is_recording = true;
  recorder_->begin();
  if (reducer != nullptr) {
    reducer->begin_recording([&](Reducer::Arrived arrived, bool last) {
      recording.backward.push_back({recorder_->end(), std::move(arrived)});
      is_recording = !last;
      if (is_recording) recorder_->begin();
    });
  }
  try {
    stage_.backward(microbatch, {}, recording.syncs);
  } catch (...) {
    if (reducer != nullptr) reducer->end_recording();
    throw;
  }
  if (reducer != nullptr) reducer->end_recording();
  if (is_recording) recording.backward.push_back({recorder_->end(), {}});
}

bool StageGraphs::backward(int microbatch, bool syncs) {
  if (current_ == nullptr) return false;
  const Recording& recording = *std::exchange(current_, nullptr);
  Reducer* const reducer = syncs ? stage_.reducer() : nullptr;
  set_gradients(recording.gradients);
  stage_.backward_by(microbatch, syncs, [&] {
    if (reducer != nullptr) reducer->begin_repeat();
    for (const Piece& piece : recording.backward) {
      piece.graph->repeat();
      if (reducer != nullptr) reducer->repeat(piece.arrived);
    }
    if (reducer != nullptr) reducer->end_repeat();
  });
  return true;
}

}  // namespace lockstep::parallel::detail

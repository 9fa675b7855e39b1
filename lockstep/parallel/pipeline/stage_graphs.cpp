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
// Names with graphs: each has memory for its activations. Recordings of all names: one for the
// first, the next and the last micro-batch, and some more where a program moves its parameters.
constexpr size_t kMostNames = 2, kMostRecordings = 16;

int64_t address(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_sparse() ? reinterpret_cast<int64_t>(tensor.data_ptr()) : 0;
}

std::vector<int64_t> places_of(const Tensors& tensors) {
  std::vector<int64_t> places;
  for (const at::Tensor& tensor : tensors) {
    places.push_back(address(tensor));
    if (!tensor.defined()) continue;
    places.push_back(static_cast<int64_t>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) places.push_back(size);
    for (const int64_t stride : tensor.strides()) places.push_back(stride);
  }
  return places;
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
  if (whole->uneven_inputs || whole->static_graph || whole->advanced.delay_all_reduce)
    refuse("the options of data parallelism have uneven_inputs, static_graph or delay_all_reduce");
  if (tensor_ranks > 1) refuse(format("{} ranks share matrices", tensor_ranks));
  const auto& actions = program.actions[0];
  int next = 0;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].op != schedule::Op::forward) continue;
    if (actions[i].microbatch != next++ || actions[i + 1].op != schedule::Op::backward) {
      refuse(
          format("schedule {} has micro-batches out of order, or other work between a forward "
                 "and its backward",
                 layout::name_of(options.schedule)));
    }
  }
}

StageGraphs::StageGraphs(Stage& stage, c10::Device device, bool must)
    : stage_(stage),
      must_(must),
      parameters_(stage.module().parameters()),
      recorder_(memory::make_graph_recorder(device)) {}

void StageGraphs::begin_step() {
  current_ = nullptr;
  repeated_.clear();
  has_recorded_ = false;
}

std::vector<int64_t> StageGraphs::state_now() const {
  std::vector<int64_t> state{stage_.module().is_training() ? 1 : 0};
  for (const at::Tensor& parameter : parameters_) {
    state.push_back(address(parameter));
    state.push_back(address(parameter.grad()));
    state.push_back(parameter.requires_grad() ? 1 : 0);
  }
  return state;
}

// What is made of weights when they change, such as 8-bit codes, is made again.
void StageGraphs::renew_weights() const {
  for (const at::Tensor& parameter : parameters_) parameter.unsafeGetTensorImpl()->bump_version();
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
  failed_ = false;
  const std::string before = std::exchange(repeated_, "");
  if (!recorder_ || name.empty()) return {};
  const bool is_first = std::ranges::none_of(
      parameters_, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
  if (is_first ? ++steps_[name] <= kEagerSteps : before != name) return {};
  current_ = find(name, syncs, inputs, microbatch);
  if (current_ == nullptr) {
    if (!has_place(name)) return {};
    if (!must_ && recordings_.empty() && !recorder_->has_room()) {
      recorder_.reset();
      log::info("graphs off: the device has less than twice the memory of a step's activations");
      return {};
    }
    // Frozen weights, too: codes that were made before are not the graph's.
    if (!has_recorded_) renew_weights();
    try {
      recordings_.push_back(
          std::make_unique<Recording>(record(name, microbatch, inputs, loss, syncs)));
    } catch (const std::exception& error) {
      renew_weights();  // what was to be made of them was recorded, and not made
      recordings_.clear();
      recorder_.reset();
      const std::string why =
          format("[pipeline] a micro-batch could not be recorded as CUDA graphs: {}", error.what());
      if (must_) throw Error(why);
      log::warn(why + "; steps continue without them");
      failed_ = true;
      return {};
    }
    has_recorded_ = true;
    current_ = recordings_.back().get();
  }
  repeated_ = name;
  current_->forward->repeat();
  return current_->loss.clone();
}

const StageGraphs::Recording* StageGraphs::find(const std::string& name, bool syncs,
                                                const Tensors& inputs, int microbatch) const {
  const auto state = state_now();
  const auto found = std::ranges::find_if(recordings_, [&](const auto& recording) {
    return recording->name == name && recording->syncs == syncs && recording->state == state;
  });
  if (found == recordings_.end()) return nullptr;
  if ((*found)->inputs != places_of(inputs)) {
    throw ConfigError(format(
        "[pipeline] micro-batch {} is recorded as '{}', but its inputs have another shape, or "
        "are not where the recorded ones were; copy them there, or give it another name",
        microbatch, name));
  }
  return found->get();
}

bool StageGraphs::has_place(const std::string& name) const {
  std::set<std::string> names{name};
  for (const auto& recording : recordings_) names.insert(recording->name);
  return names.size() <= kMostNames && recordings_.size() < kMostRecordings;
}

StageGraphs::Recording StageGraphs::record(const std::string& name, int microbatch,
                                           const Tensors& inputs, const Stage::Loss& loss,
                                           bool syncs) {
  Recording recording{
      .name = name, .syncs = syncs, .state = state_now(), .inputs = places_of(inputs)};
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
  Reducer::Arrived rest;
  if (reducer != nullptr) rest = reducer->end_recording();
  if (is_recording) recording.backward.push_back({recorder_->end(), std::move(rest)});
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
  if (!syncs && stage_.reducer() != nullptr) stage_.reducer()->note_accumulated();
  return true;
}

}  // namespace lockstep::parallel::detail

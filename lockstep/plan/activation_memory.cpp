// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/activation_memory.h"

#include <algorithm>

namespace lockstep::plan {
namespace {

class Walk {
 public:
  Walk(const Model& model, std::span<const Stage> chunks, bool keeps_gradients)
      : model_(model),
        chunks_(chunks),
        keeps_gradients_(keeps_gradients),
        has_gradients_(chunks.size(), false) {}

  void act(const schedule::Action& action) {
    const auto chunk = static_cast<size_t>(action.chunk);
    const Stage& stage = chunks_[chunk];
    switch (action.op) {
      case schedule::Op::forward:
        return forward(stage);
      case schedule::Op::backward:
        backward(stage, keeps(chunk));
        break;
      case schedule::Op::backward_input:
        return backward_input(stage);
      case schedule::Op::backward_weight:
        backward_weight(stage, keeps(chunk));
        break;
      default:
        return;
    }
    has_gradients_[chunk] = true;
  }

  int64_t peak() const { return peak_; }

 private:
  bool keeps(size_t chunk) const { return keeps_gradients_ && !has_gradients_[chunk]; }
  bool is_tied(const Stage& stage) const {
    return !model_.tied.empty() && stage.first == 0 && stage.end() == model_.layers.size();
  }
  const LayerCost& cost_of(size_t layer) const {
    return model_.kinds[model_.layers[layer].kind].cost;
  }
  void reach(int64_t bytes) { peak_ = std::max(peak_, now_ + bytes); }

  template <class Visit>
  void for_layers(const Stage& stage, Visit visit) const {
    for (size_t i = stage.first; i < stage.end(); ++i) visit(cost_of(i));
  }
  template <class Visit>
  void for_layers_backward(const Stage& stage, Visit visit) const {
    for (size_t i = stage.end(); i-- > stage.first;) visit(cost_of(i));
  }

  void forward(const Stage& stage) {
    for_layers(stage, [&](const LayerCost& layer) {
      reach(layer.forward_peak);
      now_ += layer.kept;
    });
  }

  void backward(const Stage& stage, bool keeps) {
    for (size_t i = stage.end(); i-- > stage.first;) {
      const LayerCost& layer = cost_of(i);
      reach((keeps ? layer.backward_peak_keeping : layer.backward_peak) - layer.kept);
      now_ -= layer.kept;
      if (keeps) now_ += layer.weights;
      // A shared table's gradient waits for the other one, and is then the sum of both.
      if (!is_tied(stage)) continue;
      if (i + 1 == stage.end() && !keeps) now_ += model_.tied_bytes;
      if (i == stage.first) now_ -= model_.tied_bytes;
    }
  }

  void backward_input(const Stage& stage) {
    for_layers_backward(stage, [&](const LayerCost& layer) {
      reach(layer.input_peak - layer.kept);
      now_ += layer.input_held - layer.kept;
    });
    for_layers(stage,
               [&](const LayerCost& layer) { now_ += layer.weight_kept - layer.input_held; });
  }

  void backward_weight(const Stage& stage, bool keeps) {
    for_layers_backward(stage, [&](const LayerCost& layer) {
      reach((keeps ? layer.weight_peak_keeping : layer.weight_peak) - layer.weight_kept);
      now_ -= layer.weight_kept;
      if (keeps) now_ += layer.weights;
    });
  }

  const Model& model_;
  std::span<const Stage> chunks_;
  bool keeps_gradients_;
  std::vector<bool> has_gradients_;
  int64_t now_ = 0, peak_ = 0;
};

}  // namespace

int64_t peak_of_step(const Model& model, std::span<const Stage> chunks,
                     std::span<const schedule::Action> actions, bool keeps_gradients) {
  Walk walk(model, chunks, keeps_gradients);
  for (const schedule::Action& action : actions) walk.act(action);
  return walk.peak();
}

}  // namespace lockstep::plan

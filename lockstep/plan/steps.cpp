// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/steps.h"

#include <algorithm>

namespace lockstep::plan {
namespace {

class Walk {
 public:
  Walk(std::span<const Stage> chunks, const StepFacts& facts)
      : chunks_(chunks), facts_(facts), has_gradients_(chunks.size(), false) {}

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
  bool keeps(size_t chunk) const { return facts_.keeps_gradients && !has_gradients_[chunk]; }
  bool is_tied(const Stage& stage) const {
    return stage.embedding && stage.head && facts_.tied > 0;
  }
  void reach(int64_t bytes) { peak_ = std::max(peak_, now_ + bytes); }

  template <class Visit>
  void for_layers(const Stage& stage, Visit visit) const {
    if (stage.embedding) visit(facts_.embedding);
    for (int64_t i = 0; i < stage.blocks; ++i) visit(facts_.block);
    if (stage.head) visit(facts_.head);
  }
  template <class Visit>
  void for_layers_backward(const Stage& stage, Visit visit) const {
    if (stage.head) visit(facts_.head);
    for (int64_t i = 0; i < stage.blocks; ++i) visit(facts_.block);
    if (stage.embedding) visit(facts_.embedding);
  }

  void forward(const Stage& stage) {
    for_layers(stage, [&](const Profile& layer) {
      reach(layer.forward_peak);
      now_ += layer.kept;
    });
  }

  void backward(const Stage& stage, bool keeps) {
    for_layers_backward(stage, [&](const Profile& layer) {
      reach((keeps ? layer.backward_peak_keeping : layer.backward_peak) - layer.kept);
      now_ -= layer.kept;
      if (keeps) now_ += layer.weights;
      // A shared table's gradient waits for the other one, and is then the sum of both.
      if (!is_tied(stage)) return;
      if (&layer == &facts_.head && !keeps) now_ += facts_.tied;
      if (&layer == &facts_.embedding) now_ -= facts_.tied;
    });
  }

  void backward_input(const Stage& stage) {
    for_layers_backward(stage, [&](const Profile& layer) {
      reach(layer.input_peak - layer.kept);
      now_ += layer.input_held - layer.kept;
    });
    for_layers(stage, [&](const Profile& layer) { now_ += layer.weight_kept - layer.input_held; });
  }

  void backward_weight(const Stage& stage, bool keeps) {
    for_layers_backward(stage, [&](const Profile& layer) {
      reach((keeps ? layer.weight_peak_keeping : layer.weight_peak) - layer.weight_kept);
      now_ -= layer.weight_kept;
      if (keeps) now_ += layer.weights;
    });
  }

  std::span<const Stage> chunks_;
  const StepFacts& facts_;
  std::vector<bool> has_gradients_;
  int64_t now_ = 0, peak_ = 0;
};

}  // namespace

int64_t peak_of_step(std::span<const Stage> chunks, std::span<const schedule::Action> actions,
                     const StepFacts& facts) {
  Walk walk(chunks, facts);
  for (const schedule::Action& action : actions) walk.act(action);
  return walk.peak();
}

}  // namespace lockstep::plan

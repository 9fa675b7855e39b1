// SPDX-License-Identifier: Apache-2.0
// A model in eval mode for a while. Private: not installed.
#pragma once

namespace lockstep::train {

// Anything with train() and is_training().
template <class Model>
class EvalMode {
 public:
  explicit EvalMode(Model& model) : model_(model), was_training_(model.is_training()) {
    model.eval();
  }
  ~EvalMode() { model_.train(was_training_); }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  Model& model_;
  bool was_training_;
};

}  // namespace lockstep::train

// SPDX-License-Identifier: Apache-2.0
// The loss on text that is not trained on. Private: not installed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "lockstep/comm/group.h"
#include "lockstep/data/batch.h"
#include "lockstep/data/corpus.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

struct EvaluatorOptions {
  int64_t seq_len = 0, rows = 0;  // of a batch
  int64_t vocab = 0;
  int64_t max_tokens = 0;  // about how many are evaluated, spread over the data; 0: all
  // Windows begin so many tokens apart and each counts only the targets that the one before does
  // not have; 0: they do not overlap. Of a stream of text only.
  int64_t stride = 0;
  // How many bytes of text these tokens stand for; none: they are not counted.
  std::function<int64_t(std::span<const int64_t>)> bytes_of = {};
  c10::Device device = at::kCPU;
  // Of the group, those that share the tokens of each row, and which of the ranks with rows of
  // their own this one belongs to; not set: its rank in the group.
  comm::Group context = {};
  std::optional<int> replica = std::nullopt;
};

struct Scores {
  double loss = 0;  // the sum over all targets that count
  int64_t tokens = 0, bytes = 0;

  double mean() const { return loss / static_cast<double>(tokens); }
};

// The same windows each time, whatever the number of ranks.
class Evaluator {
 public:
  Evaluator(data::Corpus corpus, comm::Group group, EvaluatorOptions options);

  // Mean over all targets that count, of all ranks' shares. Collective.
  double loss(TrainedModel& model) const { return score(model).mean(); }
  // The sums of it. `progress` is called with the part that is done, from 0 to 1.
  Scores score(TrainedModel& model, const std::function<void(double)>& progress = {}) const;
  int64_t tokens() const;  // that are evaluated: targets that count
  bool empty() const { return batches_ == 0; }

 private:
  // Of batch i of `batches_`, the first window.
  int64_t first_window(int64_t batch) const;
  data::Batch batch_from(int64_t first_window) const;

  data::Corpus corpus_;
  comm::Group group_;
  EvaluatorOptions options_;
  int64_t windows_, batches_;
  int replicas_, replica_;  // ranks that evaluate other windows, and which of them this is
};

}  // namespace lockstep::train

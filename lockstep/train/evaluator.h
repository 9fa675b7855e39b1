// SPDX-License-Identifier: Apache-2.0
// The loss on text that is not trained on. Private: not installed.
#pragma once

#include <cstdint>

#include "lockstep/comm/group.h"
#include "lockstep/data/corpus.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

struct EvaluatorOptions {
  int64_t seq_len = 0, rows = 0;  // of a batch
  int64_t vocab = 0;
  int64_t max_tokens = 0;  // about how many are evaluated, spread over the data; 0: all
  c10::Device device = at::kCPU;
};

// The same windows each time, whatever the number of ranks.
class Evaluator {
 public:
  Evaluator(data::Corpus corpus, comm::Group group, EvaluatorOptions options);

  // Mean over all targets that count, of all ranks' shares. Collective.
  double loss(TrainedModel& model) const;
  int64_t tokens() const;  // that are evaluated: targets that count
  bool empty() const { return batches_ == 0; }

 private:
  // Of batch i of `batches_`, the first window.
  int64_t first_window(int64_t batch) const;

  data::Corpus corpus_;
  comm::Group group_;
  EvaluatorOptions options_;
  int64_t windows_, batches_;
};

}  // namespace lockstep::train

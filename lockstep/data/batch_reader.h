// SPDX-License-Identifier: Apache-2.0
// The batches of one rank, read ahead on a thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/data/batch.h"
#include "lockstep/data/corpus.h"

namespace lockstep::data {

// What a rank reads. A step consumes global_batch() samples of the global order: rank 0 the first
// of them, in its micro-batches' order, then rank 1, and so on. So a step's samples do not depend
// on how its batch is cut. Micro-batches behind the last sample of a step are padding.
struct BatchPlan {
  int64_t seq_len = 0;
  int64_t micro_batch = 1;   // rows of one batch
  int64_t accumulation = 1;  // batches of one rank for one step
  int64_t dp = 1;
  int64_t dp_rank = 0;
  uint64_t seed = 0;
  int64_t vocab = 0;
  int64_t first_sample = 0;  // samples that the whole run has consumed before; where to resume
  // Rows of a step over all ranks, a multiple of micro_batch, where these are fewer than the
  // micro-batches of all ranks have; 0: they are as many.
  int64_t step_rows = 0;

  int64_t global_batch() const { return step_rows > 0 ? step_rows : all_rows(); }
  int64_t all_rows() const { return micro_batch * accumulation * dp; }
  // The position in the global order of a row of batch number `batch`, counted from here. Nothing
  // for a row of padding.
  std::optional<int64_t> sample_position(int64_t batch, int64_t row) const;
};

// For one consumer. Ends its thread when destroyed, in the middle of a batch too.
class BatchReader {
 public:
  // Keeps up to `depth` batches ready. ConfigError for a plan that cannot be, and for data with
  // less than one sample.
  BatchReader(Corpus corpus, const BatchPlan& plan, int64_t depth = 4);
  ~BatchReader();
  BatchReader(BatchReader&&) noexcept;
  BatchReader& operator=(BatchReader&&) noexcept;

  // The next micro-batch; there is no end. Throws what went wrong in reading it, such as
  // ConfigError for an id outside the vocabulary, and again at every later call.
  Batch next();

  int64_t samples() const;  // in one epoch

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::data

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/evaluator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/data/batch.h"
#include "lockstep/train/batches.h"

namespace lockstep::train {
namespace {

// Windows of `length` tokens, of which all but the last are inputs, until one has the last token.
int64_t overlapping_windows(int64_t tokens, int64_t length, int64_t stride) {
  if (tokens < 2) return 0;
  return 1 + (std::max<int64_t>(tokens - length, 0) + stride - 1) / stride;
}

}  // namespace

Evaluator::Evaluator(data::Corpus corpus, comm::Group group, EvaluatorOptions options)
    : corpus_(std::move(corpus)),
      group_(std::move(group)),
      options_(options),
      windows_(options.stride > 0
                   ? overlapping_windows(corpus_.size(), options.seq_len, options.stride)
                   : data::evaluation_windows(corpus_, options.seq_len)),
      replicas_(group_.size() / options_.context.size()),
      replica_(options_.replica.value_or(group_.rank())) {
  batches_ = (windows_ + options.rows - 1) / options.rows;
  if (options.max_tokens > 0) {
    const int64_t batch = options.seq_len * options.rows;
    batches_ = std::min(batches_, (options.max_tokens + batch - 1) / batch);
  }
}

int64_t Evaluator::first_window(int64_t batch) const {
  const int64_t all = (windows_ + options_.rows - 1) / options_.rows;
  return batch * all / batches_ * options_.rows;
}

int64_t Evaluator::tokens() const {
  if (corpus_.has_examples()) {
    int64_t targets = 0;
    for (int64_t batch = 0; batch < batches_; ++batch) {
      const int64_t end = std::min(first_window(batch) + options_.rows, windows_);
      for (int64_t i = first_window(batch); i < end; ++i) {
        targets += data::sample_size(corpus_, i, options_.seq_len).targets;
      }
    }
    return targets;
  }
  const int64_t most = batches_ * options_.rows * options_.seq_len;
  return std::min(most, std::max<int64_t>(corpus_.size() - 1, 0));
}

data::Batch Evaluator::batch_from(int64_t first_window) const {
  if (options_.stride == 0) {
    return data::evaluation_batch(corpus_, {.seq_len = options_.seq_len,
                                            .vocab = options_.vocab,
                                            .first_window = first_window,
                                            .rows = options_.rows});
  }
  data::Batch batch;
  for (int64_t i = first_window; i < first_window + options_.rows; ++i) {
    data::Row row{.seq_len = options_.seq_len, .vocab = options_.vocab};
    if (i < windows_) {
      row.begin = i * options_.stride;
      const int64_t end = std::min(row.begin + options_.seq_len, corpus_.size());
      const int64_t scored = i == 0 ? 1 : row.begin - options_.stride + options_.seq_len;
      row.count = end - row.begin - 1;
      row.unanswered = std::max<int64_t>(scored - row.begin - 1, 0);
    }
    batch.add(corpus_, row);
  }
  return batch;
}

Scores Evaluator::score(TrainedModel& model, const std::function<void(double)>& progress) const {
  double sum = 0, tokens = 0, bytes = 0;
  // All ranks run the model equally often, which a sharded one needs; what is too much is not
  // counted.
  const int64_t rounds = (batches_ + replicas_ - 1) / replicas_;
  // Ranks that share rows have the loss of their tokens; one of them counts the rows.
  const bool counted = options_.context.rank() == 0;
  for (int64_t round = 0; round < rounds; round += model.batches_at_once()) {
    std::vector<Tensors> tensors;
    std::vector<double> counts;
    for (int64_t i = round; i < std::min(rounds, round + model.batches_at_once()); ++i) {
      const int64_t batch = i * replicas_ + replica_;
      const auto rows = batch_from(first_window(std::min(batch, batches_ - 1)));
      tensors.push_back(to_tensors(rows, options_.seq_len, options_.device, options_.context));
      std::vector<int64_t> targets = rows.target;
      std::erase(targets, data::kIgnoredTarget);
      counts.push_back(batch < batches_ ? static_cast<double>(targets.size()) : 0);
      if (batch < batches_ && options_.bytes_of && counted)
        bytes += static_cast<double>(options_.bytes_of(targets));
    }
    const std::vector<double> losses = model.evaluate(tensors);
    for (size_t i = 0; i < losses.size(); ++i) {
      if (counts[i] == 0) continue;
      sum += losses[i];
      if (counted) tokens += counts[i];
    }
    if (progress)
      progress(static_cast<double>(std::min(rounds, round + model.batches_at_once())) /
               static_cast<double>(rounds));
  }
  const at::Tensor sums = at::tensor({sum, tokens, bytes}, at::kDouble);
  comm::all_reduce(sums, group_, {.tag = "validation"}).wait();
  const double* all = sums.data_ptr<double>();
  return {all[0], static_cast<int64_t>(all[1]), static_cast<int64_t>(all[2])};
}

}  // namespace lockstep::train

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/evaluator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/data/batch.h"
#include "lockstep/train/batches.h"

namespace lockstep::train {
Evaluator::Evaluator(data::Corpus corpus, comm::Group group, EvaluatorOptions options)
    : corpus_(std::move(corpus)),
      group_(std::move(group)),
      options_(options),
      windows_(data::evaluation_windows(corpus_, options.seq_len)) {
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
        const auto row = data::sample_row(corpus_, i, {.seq_len = options_.seq_len});
        targets += row.count - row.unanswered;
      }
    }
    return targets;
  }
  const int64_t most = batches_ * options_.rows * options_.seq_len;
  return std::min(most, std::max<int64_t>(corpus_.size() - 1, 0));
}

double Evaluator::loss(TrainedModel& model) const {
  double sum = 0, tokens = 0;
  // All ranks run the model equally often, which a sharded one needs; what is too much is not
  // counted.
  const int64_t rounds = (batches_ + group_.size() - 1) / group_.size();
  for (int64_t round = 0; round < rounds; round += model.batches_at_once()) {
    std::vector<Tensors> tensors;
    std::vector<double> counts;
    for (int64_t i = round; i < std::min(rounds, round + model.batches_at_once()); ++i) {
      const int64_t batch = i * group_.size() + group_.rank();
      const auto rows = data::evaluation_batch(
          corpus_, {.seq_len = options_.seq_len,
                    .vocab = options_.vocab,
                    .first_window = first_window(std::min(batch, batches_ - 1)),
                    .rows = options_.rows});
      tensors.push_back(to_tensors(rows, options_.seq_len, options_.device));
      const auto real = std::ranges::count_if(
          rows.target, [](int64_t target) { return target != data::kIgnoredTarget; });
      counts.push_back(batch < batches_ ? static_cast<double>(real) : 0);
    }
    const std::vector<double> losses = model.evaluate(tensors);
    for (size_t i = 0; i < losses.size(); ++i) {
      if (counts[i] == 0) continue;
      sum += losses[i];
      tokens += counts[i];
    }
  }
  const at::Tensor sums = at::tensor({sum, tokens}, at::kDouble);
  comm::all_reduce(sums, group_, {.tag = "validation"}).wait();
  return (sums[0] / sums[1]).item<double>();
}

}  // namespace lockstep::train

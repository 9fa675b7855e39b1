#include "lockstep/train/evaluator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/formats/batch.h"
#include "lockstep/nn/loss.h"
#include "lockstep/train/batches.h"

namespace lockstep::train {
namespace {

class EvalMode {
 public:
  explicit EvalMode(torch::nn::Module& model) : model_(model), was_training_(model.is_training()) {
    model.eval();
  }
  ~EvalMode() { model_.train(was_training_); }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  torch::nn::Module& model_;
  bool was_training_;
};

}  // namespace

Evaluator::Evaluator(formats::Corpus corpus, comm::Group group, EvaluatorOptions options)
    : corpus_(std::move(corpus)),
      group_(std::move(group)),
      options_(options),
      windows_(formats::evaluation_windows(corpus_.size(), options.seq_len)) {
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
  const int64_t most = batches_ * options_.rows * options_.seq_len;
  return std::min(most, std::max<int64_t>(corpus_.size() - 1, 0));
}

double Evaluator::loss(model::LanguageModelImpl& model) const {
  const at::NoGradGuard no_grad;
  const EvalMode eval(model);
  const at::Tensor sums = at::zeros({2}, at::kDouble);  // loss, tokens
  // All ranks run the model equally often, which a sharded one needs; what is too much is not
  // counted.
  for (int64_t first = 0; first < batches_; first += group_.size()) {
    const int64_t batch = std::min(first + group_.rank(), batches_ - 1);
    const auto rows = formats::evaluation_batch(corpus_, {.seq_len = options_.seq_len,
                                                          .vocab = model.spec().vocab,
                                                          .first_window = first_window(batch),
                                                          .rows = options_.rows});
    const Tensors tensors = to_tensors(rows, options_.seq_len, options_.device);
    const at::Tensor logits = model.forward(tensors.input).flatten(0, 1);
    const at::Tensor loss = nn::cross_entropy(logits, tensors.target, {.overwrite_logits = true});
    if (first + group_.rank() >= batches_) continue;
    sums[0] += loss.item<double>();
    sums[1] += static_cast<double>(std::ranges::count_if(
        rows.target, [](int64_t target) { return target != nn::kIgnoredTarget; }));
  }
  comm::all_reduce(sums, group_, {.tag = "validation"}).wait();
  return (sums[0] / sums[1]).item<double>();
}

}  // namespace lockstep::train

// A model in stages on the ranks of a pipeline. Private: not installed.
#pragma once

#include <memory>

#include "lockstep/nn/random_context.h"
#include "lockstep/parallel/pipeline/pipeline.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {

class PipelinedModel final : public TrainedModel {
 public:
  PipelinedModel(const config::TrainConfig& config, c10::Device device, const mesh::Mesh& mesh);

  at::Tensor step(const StepInput& input) override;
  std::vector<double> evaluate(std::span<const Tensors> batches) override;
  int64_t batches_at_once() const override { return 2 * pipeline_.schedule().stages(); }
  std::vector<optim::NamedParameter> parameters() const override;
  double clip_grad_norm(double max_norm) override;
  std::vector<checkpoint::NamedSlice> slices(optim::Optimizer& optimizer) const override;
  std::vector<std::string> describe() const override;

 private:
  at::Tensor loss(const at::Tensor& logits, const at::Tensor& target, double scale) const;

  std::shared_ptr<nn::RandomContext> random_;
  bool exact_norm_;
  parallel::Pipeline pipeline_;
};

}  // namespace lockstep::train

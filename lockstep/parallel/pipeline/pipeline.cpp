// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/pipeline.h"

#include <ATen/ATen.h>

#include "lockstep/parallel/pipeline/engine.h"
#include "lockstep/parallel/shard/consumed_norm.h"

namespace lockstep::parallel {
namespace {

std::shared_ptr<detail::PipelineEngine> make_engine(const std::vector<Layer>& layers,
                                                    const mesh::Mesh& mesh,
                                                    PipelineOptions options) {
  std::vector<std::string> used{"pp"};
  const auto group_of = [&](const std::string& axis) {
    if (!mesh.has(axis)) return comm::Group();
    used.push_back(axis);
    return mesh[axis].group();
  };
  detail::Axes axes{
      .pipeline = mesh["pp"], .data = group_of("dp"), .tensor = group_of("tp"), .all = {}};
  axes.all = used.size() == 1 ? axes.pipeline : mesh.slice(used).flatten();
  return std::make_shared<detail::PipelineEngine>(layers, axes, std::move(options));
}

}  // namespace

Pipeline::Pipeline(const std::vector<Layer>& layers, const mesh::Mesh& mesh,
                   PipelineOptions options)
    : mesh_(mesh), engine_(make_engine(layers, mesh, std::move(options))) {}
Pipeline::Pipeline(const std::vector<Layer>& layers, const comm::Group& group,
                   PipelineOptions options)
    : Pipeline(layers, mesh::Mesh::linear(group, "pp"), std::move(options)) {}

at::Tensor Pipeline::step(const PipelineBatch& batch, PipelineStep options) {
  return engine_->step(batch, options);
}
at::Tensor Pipeline::evaluate(const PipelineBatch& batch, int microbatches) {
  return engine_->evaluate(batch, microbatches);
}

std::vector<Tensors> Pipeline::forward(const std::function<Tensors(int microbatch)>& inputs,
                                       int microbatches) {
  std::vector<Tensors> outputs(has_last_stage() ? static_cast<size_t>(microbatches) : 0);
  evaluate({.inputs = inputs,
            .loss =
                [&](int i, const Tensors& given) {
                  outputs[static_cast<size_t>(i)] = given;
                  return at::zeros({});
                }},
           microbatches);
  return outputs;
}

bool Pipeline::hold(int64_t budget) { return engine_->hold(budget); }

std::vector<optim::NamedParameter> Pipeline::named_parameters() const {
  return tensor().placed(engine_->named_parameters());
}
std::vector<at::Tensor> Pipeline::parameters() const {
  return optim::tensors_of(engine_->named_parameters());
}
double Pipeline::grad_norm(optim::NormOptions options) const {
  return engine_->grad_norm(std::move(options));
}
std::vector<optim::NamedParameter> Pipeline::counted_parameters() const {
  return engine_->counted_parameters();
}
comm::Group Pipeline::counted_group() const { return engine_->counted_group(); }
double Pipeline::clip_grad_norm_(double max_norm, optim::NormOptions options) const {
  for (const ShardedModel& model : sharded()) detail::require_clipping(model);
  const double norm = grad_norm(std::move(options));
  optim::clip_grad_with_norm(parameters(), max_norm, norm);
  return norm;
}

void Pipeline::train(bool on) {
  for (const auto& stage : engine_->stages()) stage->module().train(on);
}
bool Pipeline::is_training() const { return engine_->stages().front()->module().is_training(); }

bool Pipeline::has_first_stage() const { return engine_->owns_stage(0); }
bool Pipeline::has_last_stage() const {
  return engine_->owns_stage(engine_->layout().stages() - 1);
}
std::vector<int> Pipeline::stages() const {
  std::vector<int> all;
  for (size_t chunk = 0; chunk < engine_->stages().size(); ++chunk)
    all.push_back(engine_->stage(chunk));
  return all;
}
std::vector<std::shared_ptr<torch::nn::Module>> Pipeline::modules() const {
  std::vector<std::shared_ptr<torch::nn::Module>> all;
  for (const auto& stage : engine_->stages()) all.push_back(stage->shared_module());
  return all;
}
std::vector<LayerForward> Pipeline::layers() const {
  std::vector<LayerForward> all;
  for (const auto& stage : engine_->stages()) {
    const auto& layers = stage->layers();
    all.insert(all.end(), layers.begin(), layers.end());
  }
  return all;
}
std::vector<ShardedModel> Pipeline::sharded() const {
  std::vector<ShardedModel> all;
  for (const auto& stage : engine_->stages()) {
    if (stage->sharded()) all.push_back(*stage->sharded());
  }
  return all;
}
const TensorParallel& Pipeline::tensor() const { return engine_->tensor(); }
std::vector<std::string> Pipeline::tied_copies(size_t stage) const {
  std::vector<std::string> names;
  for (const auto& item : engine_->stages().at(stage)->module().named_parameters()) {
    if (engine_->is_tied_copy(stage, item.key())) names.push_back(item.key());
  }
  return names;
}

const schedule::Schedule& Pipeline::schedule() const { return engine_->schedule; }
const schedule::Program& Pipeline::program() const { return engine_->program(); }
const PipelineOptions& Pipeline::options() const { return engine_->options; }
PipelineStats Pipeline::stats() const { return engine_->stats; }
std::span<const TimedAction> Pipeline::timeline() const { return engine_->timeline; }

}  // namespace lockstep::parallel

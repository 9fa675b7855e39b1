// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torch/cuda.h>

#include <algorithm>
#include <numeric>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/abort.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"
#include "lockstep/core/trace.h"
#include "lockstep/layout/parallel_config.h"
#include "lockstep/memory/device_size.h"
#include "lockstep/parallel/shard/sharded_model_state.h"

namespace lockstep::parallel {

namespace detail {
namespace {

using schedule::Action;
using schedule::Op;

// All micro-batches through one chunk after the other.
schedule::Program forward_alone(const schedule::Pipeline& layout, int microbatches,
                                schedule::LowerOptions options) {
  schedule::Schedule all;
  static_cast<schedule::Pipeline&>(all) = layout;
  all.kind = schedule::Kind::file;
  all.microbatches = microbatches;
  all.actions.resize(static_cast<size_t>(layout.ranks));
  for (auto& actions : all.actions) {
    for (int chunk = 0; chunk < layout.chunks; ++chunk) {
      for (int i = 0; i < microbatches; ++i) actions.push_back({Op::forward, i, chunk});
    }
    for (int chunk = layout.chunks; chunk-- > 0;) {
      for (int i = 0; i < microbatches; ++i) actions.push_back({Op::backward, i, chunk});
    }
  }
  options.reduce = false;
  schedule::Program program = schedule::lower(all, options);
  for (auto& actions : program.actions) {
    std::erase_if(actions, [](const Action& action) {
      return action.op == Op::backward || action.op == Op::send_gradient ||
             action.op == Op::recv_gradient;
    });
  }
  return program;
}

// A budget of the device need not hold a whole stage.
bool offloads_parameters(const FullyShardOptions& shard) {
  const auto* const offload = std::get_if<layout::OffloadOptions>(&shard.offload);
  return offload != nullptr && offload->params;
}

schedule::LowerOptions lower_options(const PipelineOptions& options,
                                     const schedule::Pipeline& layout) {
  const auto* const shard = std::get_if<FullyShardOptions>(&options.data);
  return {.unshard = shard != nullptr && !offloads_parameters(*shard) &&
                     options.advanced.max_unsharded > 0 && layout.stages() > 1,
          .max_unsharded = std::max(1, options.advanced.max_unsharded),
          .reduce = true};
}

// As long as ranks move on, each within the timeout.
milliseconds longest_wait(const schedule::Program& program, milliseconds timeout) {
  size_t actions = 1;
  for (const auto& each : program.actions) actions += each.size();
  return timeout * actions;
}

// Budgets of offload are the rank's, those that are left open too: its stages share them.
PipelineOptions of_a_stage(PipelineOptions options, int chunks) {
  auto* const shard = std::get_if<FullyShardOptions>(&options.data);
  auto* const offload =
      shard == nullptr ? nullptr : std::get_if<layout::OffloadOptions>(&shard->offload);
  if (offload == nullptr) return options;
  const c10::Device device =
      options.advanced.initializer ? options.advanced.initializer->device : options.device;
  *offload = layout::divided(layout::resolved(*offload, memory::device_bytes(device),
                                              static_cast<int64_t>(available_memory())),
                             chunks);
  return options;
}

std::vector<std::string> tied_modules(const std::vector<Layer>& layers) {
  std::vector<std::string> paths;
  for (const Layer& layer : layers) {
    if (!layer.tied.empty()) paths.push_back(layer.tied);
  }
  return paths;
}

// Shards of units have the units' names, which do not say which stage or parameter they are of.
void check_names(const PipelineOptions& options, const std::vector<Layer>& layers,
                 const schedule::Pipeline& layout, const Axes& axes) {
  const auto* shard = std::get_if<FullyShardOptions>(&options.data);
  if (shard == nullptr || shard->use_orig_params || axes.data.size() == 1) return;
  const size_t tied = options.tied.size() + tied_modules(layers).size();
  if (tied == 0 && layout.chunks == 1 && axes.tensor.size() == 1) return;
  throw ConfigError(format(
      "[pipeline] sharded stages with {} chunks per rank, {} tied parameters or layers and {} "
      "tensor-parallel ranks need use_orig_params",
      layout.chunks, tied, axes.tensor.size()));
}

// A rank's tensors for another stage: values, and whether their gradients are wanted.
Tensors as_leaves(Tensors tensors) {
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.detach().requires_grad_(tensor.requires_grad());
  }
  return tensors;
}

std::vector<int> cut_into_stages(int64_t layers, int stages, const std::vector<int>& split) {
  if (const auto counts = layout::layers_per_stage(layers, stages, split)) return *counts;
  if (split.empty()) {
    std::vector<int64_t> even;
    for (int64_t stage = 0; stage < stages; ++stage)
      even.push_back(layers / stages + (stage < layers % stages ? 1 : 0));
    throw ConfigError(
        format("[pipeline] {} layers over {} stages, must be a multiple; or give split, the "
               "layers of each stage, such as {{{}}}",
               layers, stages, join(even)));
  }
  throw ConfigError(
      format("[pipeline] split is {}: {} stages with {} layers, must be {} stages with at least "
             "one layer each and {} layers in all",
             join(split), split.size(), std::accumulate(split.begin(), split.end(), int64_t{0}),
             stages, layers));
}

// Ranks whose norm_parameters() are the model's together: those of "pp" and "tp", and those of "dp"
// that share a stage out among them, or of which one counts what all have.
comm::Group make_norm_group(const std::vector<std::unique_ptr<Stage>>& stages, const Axes& axes) {
  int sharing = 1;
  if (const auto& sharded = stages.front()->sharded(); sharded) {
    const auto& options = sharded->options();
    sharing = options.strategy == ShardingStrategy::hybrid_shard
                  ? options.advanced.hybrid_group_size
                  : axes.data.size();
  }
  return axes.all.split(axes.data.rank() / std::max(1, sharing), axes.all.rank());
}

}  // namespace

PipelineEngine::PipelineEngine(const std::vector<Layer>& layers, const Axes& axes,
                               PipelineOptions given)
    : options(std::move(given)),
      schedule(schedule::generate({.kind = options.schedule,
                                   .ranks = axes.pipeline.size(),
                                   .microbatches = options.microbatches,
                                   .chunks = options.chunks,
                                   .group = options.advanced.group,
                                   .file = options.advanced.schedule_file})),
      all_(axes.all),
      pipeline_(axes.pipeline.split(0, axes.pipeline.rank())),
      tensor_(axes.tensor, options.plan,
              {.sequence_parallel = options.advanced.sequence_parallel,
               .broadcast = !options.advanced.initializer.has_value()}),
      data_rank_(axes.data.rank()),
      program_(schedule::lower(schedule, lower_options(options, schedule))),
      patience_(longest_wait(program_, axes.pipeline.timeout())),
      mailbox_(axes.pipeline.split(0, axes.pipeline.rank()), options.device, patience_),
      progress_(pipeline_, [this](const std::string& why) { abort(why); }) {
  schedule::check_deadlock(program_);
  check_names(options, layers, schedule, axes);
  try {
    if (options.advanced.graphs != PipelineGraphs::none) {
      require_recordable(options, program_, tensor_.group().size());
      stream_ = memory::own_stream(options.device);
      if (!stream_ && options.advanced.graphs == PipelineGraphs::always) {
        throw ConfigError(format("[pipeline] graphs are always wanted, but the device is {}",
                                 options.device.str()));
      }
    }
    // Autograd adds gradients on the stream on which it first knew of the parameter.
    const memory::OnStream stream(stream_);
    build(layers, axes);
    if (stream_) {
      graphs_ = std::make_unique<StageGraphs>(*stages_[0], stream_->device(),
                                              options.advanced.graphs == PipelineGraphs::always);
    }
  } catch (const std::exception& error) {
    abort(format("rank {} could not build its stages: {}", rank(), error.what()));
    throw;
  }
}

void PipelineEngine::abort(const std::string& why) {
  mailbox_.abort(why);
  comm::abort(pipeline_, why);  // some may have no message to wait for, but tied values or losses
}

// A rule names a module of some stage. Collective over the ranks of the pipeline.
void PipelineEngine::check_plan() {
  const size_t rules = tensor_.used().size();
  const at::Tensor flags = at::zeros({static_cast<int64_t>(rules)}, at::kByte);
  for (size_t i = 0; i < rules; ++i) flags.data_ptr<uint8_t>()[i] = tensor_.used()[i] ? 1 : 0;
  comm::all_reduce(flags, pipeline_, {.op = comm::ReduceOp::max, .tag = "plan"}).wait();
  const uint8_t* first = flags.data_ptr<uint8_t>();
  layout::require_all_used(options.plan, std::vector<bool>(first, first + rules));
}

void PipelineEngine::build(const std::vector<Layer>& layers, const Axes& axes) {
  const auto counts =
      cut_into_stages(static_cast<int64_t>(layers.size()), layout().stages(), options.split);
  std::vector<Stage*> mine;
  const PipelineOptions of_each = with_tied_layers(of_a_stage(options, layout().chunks), layers);
  for (int chunk = 0; chunk < layout().chunks; ++chunk) {
    const int stage = layout().stage(rank(), chunk);
    const int first = std::accumulate(counts.begin(), counts.begin() + stage, 0);
    stages_.push_back(std::make_unique<Stage>(
        std::span(layers).subspan(static_cast<size_t>(first),
                                  static_cast<size_t>(counts[static_cast<size_t>(stage)])),
        axes.data, tensor_, of_each));
    mine.push_back(stages_.back().get());
  }
  check_plan();
  tied_ = std::make_unique<TiedParameters>(options.tied, tied_modules(layers), mine, layout(),
                                           pipeline_, patience_);
  norm_group_ = make_norm_group(stages_, axes);
}

void PipelineEngine::note_memory() {
  int live = 0;
  size_t kept = 0;
  for (const auto& stage : stages_) {
    live += stage->live();
    kept += stage->kept_bytes();
  }
  stats.peak_live = std::max(stats.peak_live, live);
  stats.peak_kept_bytes = std::max(stats.peak_kept_bytes, static_cast<int64_t>(kept));
}

Tensors PipelineEngine::take(const Action& action, int step) {
  const int from = layout().place(layout().stage(rank(), action.chunk) + step).rank;
  const Progress::Waiting waiting(progress_, from == rank() ? Standing::kNone : from);
  const auto start = Clock::now();
  Tensors tensors =
      mailbox_.take({.gradient = step > 0, .microbatch = action.microbatch, .chunk = action.chunk});
  stats.waited += Clock::now() - start;
  return tensors;
}

Tensors PipelineEngine::inputs_of(const Action& action, const ProgramRun& run) {
  if (layout().stage(rank(), action.chunk) > 0) {
    return take(action, -1);
  }
  Tensors inputs = run.batch.inputs(action.microbatch);
  for (at::Tensor& input : inputs) {
    if (input.defined()) input = input.detach();
  }
  return inputs;
}

// To a stage of this rank at once; to another rank's when the program says so.
void PipelineEngine::pass_on(const Action& action, Tensors tensors, ProgramRun& run) {
  const bool forward = action.op == Op::forward;
  const int to = layout().stage(rank(), action.chunk) + (forward ? 1 : -1);
  if (to < 0 || to == layout().stages()) return;
  const schedule::Place place = layout().place(to);
  if (place.rank == rank()) {
    mailbox_.put({.gradient = !forward, .microbatch = action.microbatch, .chunk = place.chunk},
                 forward ? as_leaves(std::move(tensors)) : std::move(tensors));
  } else {
    run.outgoing[static_cast<size_t>(action.chunk)] = std::move(tensors);
  }
}

Tensors PipelineEngine::forward(const Action& action, ProgramRun& run) {
  Stage& stage = *stages_[static_cast<size_t>(action.chunk)];
  Tensors inputs = inputs_of(action, run);
  if (run.batch.begin) run.batch.begin(action.microbatch);
  const bool is_last = layout().stage(rank(), action.chunk) + 1 == layout().stages();
  const Stage::Loss loss = [&](const Tensors& outputs) {
    return run.batch.loss(action.microbatch, outputs);
  };
  run.started = Clock::now();
  if (graphs_ && run.trains) {
    if (at::Tensor found = recorded_forward(action, inputs, loss, run); found.defined()) {
      run.losses[static_cast<size_t>(action.microbatch)] = found;
      return {found};
    }
    if (graphs_->has_failed() && run.batch.begin) run.batch.begin(action.microbatch);
  }
  Tensors outputs = stage.forward(action.microbatch, std::move(inputs), is_last ? &loss : nullptr);
  if (is_last) run.losses[static_cast<size_t>(action.microbatch)] = outputs[0].detach();
  return outputs;
}

at::Tensor PipelineEngine::recorded_forward(const Action& action, const Tensors& inputs,
                                            const Stage::Loss& loss, const ProgramRun& run) {
  const std::string name = run.batch.recorded_as ? run.batch.recorded_as(action.microbatch) : "";
  const bool syncs = run.reduces && action.microbatch + 1 == layout().microbatches;
  return graphs_->forward(name, action.microbatch, inputs, loss, syncs);
}

void PipelineEngine::compute(const Action& action, bool syncs, ProgramRun& run) {
  Stage& stage = *stages_[static_cast<size_t>(action.chunk)];
  if (action.op == Op::forward) {
    pass_on(action, forward(action, run), run);
    return;
  }
  if (action.op == Op::backward_weight) {
    run.started = Clock::now();
    stage.backward_weight(action.microbatch, syncs);
    return;
  }
  Tensors gradients;
  if (layout().stage(rank(), action.chunk) + 1 < layout().stages()) {
    gradients = take(action, 1);
  }
  run.started = Clock::now();
  if (graphs_ && graphs_->backward(action.microbatch, syncs)) return;
  pass_on(action,
          action.op == Op::backward ? stage.backward(action.microbatch, gradients, syncs)
                                    : stage.backward_input(action.microbatch, gradients),
          run);
}

void PipelineEngine::add_to_trace(const TimedAction& timed, const ProgramRun& run) const {
  const int row_of = pipeline_.members()[static_cast<size_t>(rank())];
  static thread_local const trace::Row row(row_of, "pipeline");
  row.add(run.trains ? "pipeline" : "evaluate", schedule::name_of(timed.action, 2), timed.start,
          timed.end,
          format("\"stage\":{},\"rank\":{},\"dp\":{},\"step\":{}",
                 layout().stage(rank(), timed.action.chunk), rank(), data_rank_, num_steps_));
}

void PipelineEngine::act(const Action& action, bool reduces_next, ProgramRun& run) {
  const auto chunk = static_cast<size_t>(action.chunk);
  switch (action.op) {
    case Op::forward:
    case Op::backward:
    case Op::backward_input:
    case Op::backward_weight: {
      compute(action, reduces_next && run.reduces, run);
      // Without it the trace would show how long it takes to queue the work.
      if (trace::enabled() && options.device.is_cuda()) torch::cuda::synchronize();
      const TimedAction timed{action, run.started, Clock::now()};
      if (trace::enabled()) add_to_trace(timed, run);
      if (!run.trains) return;
      timeline.push_back(timed);
      note_memory();
      return;
    }
    case Op::send_activation:
    case Op::send_gradient:
      mailbox_.send(std::exchange(run.outgoing[chunk], {}), layout().peer(rank(), action));
      return;
    case Op::recv_activation:
    case Op::recv_gradient:
      mailbox_.expect({.gradient = action.op == Op::recv_gradient,
                       .microbatch = action.microbatch,
                       .chunk = action.chunk},
                      layout().peer(rank(), action));
      return;
    case Op::unshard:
      stages_[chunk]->unshard();
      return;
    case Op::reshard:
      stages_[chunk]->reshard();
      return;
    case Op::reduce:
      if (run.reduces) stages_[chunk]->reduce();
      return;
  }
}

at::Tensor PipelineEngine::run(const schedule::Program& program, ProgramRun run) {
  if (run.trains) {
    stats = {};
    timeline.clear();
  }
  run.outgoing.resize(stages_.size());
  run.losses.resize(static_cast<size_t>(program.microbatches));
  progress_.begin(program);
  const auto wait_for_all = [this](const auto& call) {
    const Progress::Waiting waiting(progress_, Standing::kAll);
    return call();
  };
  try {
    if (run.trains) {
      for (const auto& stage : stages_) stage->begin_step();
      if (graphs_) graphs_->begin_step();
    }
    wait_for_all([&] { tied_->copy_values(); });
    const auto& actions = program.actions[static_cast<size_t>(rank())];
    for (size_t i = 0; i < actions.size(); ++i) {
      // The last gradients of a chunk are reduced while they are computed. The gradient that goes
      // to another rank must not wait for that.
      const auto reduces = [&](size_t next) {
        return next < actions.size() && actions[next].op == Op::reduce &&
               actions[next].chunk == actions[i].chunk;
      };
      progress_.reach(i);
      act(actions[i], reduces(i + 1), run);
    }
    progress_.reach(actions.size());
    if (run.trains && run.reduces) {
      wait_for_all([&] { tied_->return_gradients(); });
      tensor_.reduce_gradients(named_parameters());
    }
    wait_for_all([&] { mailbox_.finish(); });
    if (run.trains) ++num_steps_;
    at::Tensor losses = wait_for_all([&] { return exchange_losses(run.losses, run.leave); });
    progress_.end();
    return losses;
  } catch (const std::exception& error) {
    progress_.end();
    if (const std::exception_ptr stuck = progress_.failure()) std::rethrow_exception(stuck);
    abort(format("rank {} of the pipeline failed: {}", rank(), error.what()));
    throw;
  }
}

// From the last stage's rank to all, when all is computed: until then no thread waits for a device.
at::Tensor PipelineEngine::exchange_losses(const Tensors& losses, bool leave) {
  at::Tensor all = at::empty({static_cast<int64_t>(losses.size())}, at::kDouble);
  const int last = layout().stages() - 1;
  if (owns_stage(last)) {
    Tensors lines;
    for (const at::Tensor& loss : losses) lines.push_back(loss.reshape({1}).to(at::kDouble));
    if (leave && pipeline_.size() == 1) return at::cat(lines);
    all = at::cat(lines).cpu();
  }
  comm::broadcast(all, pipeline_,
                  {.root = layout().place(last).rank, .timeout = patience_, .tag = "losses"})
      .wait();
  return all;
}

at::Tensor PipelineEngine::step(const PipelineBatch& batch, PipelineStep how) {
  const c10::AutoGradMode grad(true);
  const memory::OnStream stream(stream_);
  for (const auto& stage : stages_) stage->set_first_microbatch(first_microbatch_);
  first_microbatch_ = how.accumulate ? first_microbatch_ + layout().microbatches : 0;
  return run(program_, {.batch = batch, .reduces = !how.accumulate, .leave = how.leave_losses});
}

at::Tensor PipelineEngine::evaluate(const PipelineBatch& batch, int microbatches) {
  if (microbatches < 1)
    throw ConfigError(format("[pipeline] {} micro-batches, must be at least 1", microbatches));
  const at::NoGradGuard no_grad;
  const memory::OnStream stream(stream_);  // whose memory it can use again
  if (forward_program_.microbatches != microbatches || forward_program_.actions.empty())
    forward_program_ = forward_alone(layout(), microbatches, lower_options(options, layout()));
  return run(forward_program_, {.batch = batch, .reduces = false, .trains = false});
}

bool PipelineEngine::hold(int64_t budget) const {
  std::vector<std::shared_ptr<ShardEngine>> engines;
  for (const auto& stage : stages_) {
    if (stage->sharded() && stage->sharded()->shared()->engine)
      engines.push_back(stage->sharded()->shared()->engine);
  }
  return detail::hold(engines, budget, all_);
}

bool PipelineEngine::is_tied_copy(size_t chunk, const std::string& name) const {
  return tied_->is_copy(static_cast<int>(chunk), name);
}

std::vector<optim::NamedParameter> PipelineEngine::named_parameters() const {
  std::vector<optim::NamedParameter> all;
  for (size_t chunk = 0; chunk < stages_.size(); ++chunk) {
    for (auto& parameter : stages_[chunk]->named_parameters()) {
      if (!is_tied_copy(chunk, parameter.name)) all.push_back(std::move(parameter));
    }
  }
  return all;
}

double PipelineEngine::grad_norm(optim::NormOptions how) const {
  how.group = norm_group_;
  how.exact =
      how.exact || std::visit([](const auto& data) { return data.reproducible; }, options.data);
  return optim::grad_norm(optim::tensors_of(counted_parameters()), how);
}

std::vector<optim::NamedParameter> PipelineEngine::counted_parameters() const {
  std::vector<optim::NamedParameter> mine;
  // Copies have given their gradients away.
  for (const auto& stage : stages_) {
    for (auto& parameter : stage->norm_parameters()) mine.push_back(std::move(parameter));
  }
  return tensor_.counted(std::move(mine));
}

}  // namespace detail
}  // namespace lockstep::parallel

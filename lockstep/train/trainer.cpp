// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <vector>

#include "lockstep/checkpoint/background_saver.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/config/freeze.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/plan/planned_run.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/data/batch_reader.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/optim/lr_schedule.h"
#include "lockstep/optim/step_guard.h"
#include "lockstep/train/batches.h"
#include "lockstep/train/checkpoints/best_checkpoint.h"
#include "lockstep/train/checkpoints/named_checkpoint.h"
#include "lockstep/train/data_report.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/evaluator.h"
#include "lockstep/train/integrity/bad_steps.h"
#include "lockstep/train/integrity/fault_injection.h"
#include "lockstep/train/integrity/state_vote.h"
#include "lockstep/train/memory_report.h"
#include "lockstep/train/observe/health.h"
#include "lockstep/train/observe/run_observer.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/run_record.h"
#include "lockstep/train/start_lines.h"
#include "lockstep/train/step_sums.h"
#include "lockstep/train/stop_request.h"
#include "lockstep/train/text_sample.h"
#include "lockstep/train/threads.h"
#include "lockstep/train/trained_model.h"

namespace lockstep::train {
namespace {

using config::TrainConfig;

optim::LrSchedule make_schedule(const TrainConfig& config) {
  return optim::LrSchedule(optim::parse_schedule(config.optim.schedule),
                           {.lr = config.optim.lr,
                            .warmup_steps = config.warmup(),
                            .total_steps = config.train.steps,
                            .decay_steps = config.optim.decay_steps,
                            .min_ratio = config.optim.min_lr_ratio});
}

// With nothing left open that a later reader of the checkpoint would have to know.
TrainConfig completed(TrainConfig config, const data::Tokenizer& tokenizer) {
  config.model = config::resolve_model(config, tokenizer.vocab_size());
  config.data.tokenizer = config::tokenizer_name(config);
  return config;
}

// Ranks that read different files would train on, each on its own.
config::DataIdentities compared(config::DataIdentities identities, const comm::Group& world) {
  comm::require_same(config::describe(identities), world);
  return identities;
}

plan::Memory predicted(const TrainConfig& config, const comm::Group& world) {
  const auto ranks = plan::memory_per_rank(config::planned_run(config, config.model, world.size()));
  return ranks[static_cast<size_t>(world.rank())];
}

// Validation losses with the same text can be compared.
std::string measure_of(const Evaluator& evaluator, const config::Data& data,
                       const TrainConfig& config) {
  if (!config.checkpoint.best) return "";
  return format("{} tokens of data with {}, seq_len {}", evaluator.tokens(),
                data.validation.identity().describe(), config.train.seq_len);
}

}  // namespace

struct Trainer::State {
  State(TrainConfig given, comm::Group group);
  ~State() { flight::set_phase(flight::Phase::ended); }

  checkpoint::LoadOptions load_options() const;
  void resume();
  void roll_back();
  TrainingResult run();
  StepMetrics step();
  void verify();
  bool evaluate();
  void save(checkpoint::WhenBusy when_busy);
  void say_what_was_saved();

  StopRequest stop;  // first: a signal may come while the rest is made
  const comm::Group world;
  const config::Data data;
  const TrainConfig config;
  const config::DataIdentities identities;
  const std::string threads;
  const c10::Device device;
  const RunRecord record;
  const int64_t accumulation, global_batch;
  TrainedModel model;
  const mesh::Mesh mesh;
  const comm::Group dp;
  const std::unique_ptr<optim::Optimizer> optimizer;
  const optim::LrSchedule schedule;
  optim::StepGuard guard;
  const Evaluator evaluator;
  BestCheckpoint best;
  FaultInjection faults;
  StateVote vote;
  BadSteps bad_steps;
  BadSteps::Step last_step;
  std::optional<checkpoint::Saver> saver;
  int64_t done = 0;                 // steps
  int64_t samples = 0, tokens = 0;  // that these steps have seen
  int64_t saved_at = -1, evaluated_at = -1, verified_at = -1;
  bool stopping = false;
  std::string resumed_from;
  std::optional<data::BatchReader> reader;
  std::optional<RunObserver> observer;
  std::optional<Health> health;
  QueuedWork queued_update{device};
  double saving_ms = 0;  // since the last step
  int64_t measures_at;   // the step whose memory and pipeline the run folder gets
  std::optional<plan::Memory> measured;
  std::optional<Progress> progress;
};

Trainer::State::State(TrainConfig given, comm::Group group)
    : world(std::move(group)),
      data(config::open_data(given)),
      config(completed(std::move(given), data.tokenizer)),
      identities(compared(data.identities(config.data), world)),
      threads(set_threads(config, world)),
      device(choose_device(config, world)),
      record(record_start(config, world, device)),
      accumulation(config.accumulation(world.size())),
      global_batch(config.global_batch(world.size())),
      model(config, device, world),
      mesh(model.mesh()),
      dp(mesh["dp"]),
      optimizer(make_optimizer(config, model)),
      schedule(make_schedule(config)),
      guard(world),
      evaluator(data.validation, dp,
                {.seq_len = config.train.seq_len,
                 .rows = config.train.micro_batch,
                 .vocab = config.model.vocab,
                 .max_tokens = config.train.eval_tokens,
                 .device = device}),
      best(config.checkpoint, measure_of(evaluator, data, config), world),
      faults(world.rank(), world.size()),
      vote(world, config.train.on_corruption),
      bad_steps(config.train, world.rank() == 0) {
  if (config.train.reproducible && device.is_cuda()) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  }
  if (!config.checkpoint.dir.empty()) {
    saver.emplace(config.checkpoint.dir, world,
                  checkpoint::SaverOptions{.background = config.checkpoint.async});
    saver->lock();  // before it is decided what to resume from
  }
  resume();
  reader.emplace(data.train, data::BatchPlan{.seq_len = config.train.seq_len,
                                             .micro_batch = config.train.micro_batch,
                                             .accumulation = accumulation,
                                             .dp = dp.size(),
                                             .dp_rank = dp.rank(),
                                             .seed = static_cast<uint64_t>(config.train.seed),
                                             .vocab = config.model.vocab,
                                             .first_sample = samples});
  if (saver) saver->reserve(model.slices(*optimizer));
  commit_start(config, world);
  observer.emplace(config, world, done);
  if (config.metrics.health_every > 0) health.emplace(config.model);
  measures_at = std::min(done + 3, config.train.steps);
  progress.emplace(world.rank() == 0, done, config.train.steps, config.train.log_every);
}

checkpoint::LoadOptions Trainer::State::load_options() const {
  checkpoint::LoadOptions options{.partial = config.checkpoint.partial};
  // The state of parameters that were trained before they were frozen.
  for (const std::string& frozen : config::frozen_tensors(config, config.model))
    options.may_ignore.push_back(format("optim.{}.", frozen));
  return options;
}

void Trainer::State::resume() {
  const std::string& name = config.checkpoint.resume;
  if (name == "none") return;
  const bool goes_on = config.checkpoint.load == config::LoadWhat::all;
  const auto slices = goes_on ? model.slices(*optimizer) : model.slices();
  checkpoint::LoadOptions options = load_options();
  if (!goes_on) options.may_ignore = {"optim."};
  const auto loaded = name == "auto"
                          ? checkpoint::load_newest(config.checkpoint.dir, slices, world, options)
                          : std::optional(load_named(name, slices, world, options));
  if (!loaded) return;
  resumed_from = loaded->path;
  if (!goes_on) return;
  config::require_same_data({.state = loaded->state, .config = loaded->config}, identities, config,
                            loaded->path, world.rank() == 0);
  done = loaded->step;
  const auto position = loaded->state.find("samples");
  if (position == loaded->state.end()) {
    throw CheckpointError(
        format("{} was not written by lockstep train: it does not say how much of "
               "the data was seen",
               loaded->path));
  }
  samples = std::stoll(position->second);
  if (const auto seen = loaded->state.find("tokens"); seen != loaded->state.end())
    tokens = std::stoll(seen->second);
  best.restore(loaded->state);
  saved_at = config.checkpoint.resume == "auto" ? done : -1;
}

// The reader is not moved: the samples since the checkpoint are not seen again.
void Trainer::State::roll_back() {
  progress->pause();
  const int64_t bad = done;
  try {
    saver->wait();
  } catch (const CommError&) {
    throw;
  } catch (const Error&) {  // there was a warning, and an older checkpoint will do
  }
  say_what_was_saved();
  const auto loaded = checkpoint::load_newest(config.checkpoint.dir, model.slices(*optimizer),
                                              world, load_options());
  if (!loaded) {
    throw Error(format("step {} is to be rolled back, but {} has no checkpoint yet", bad,
                       config::shown_path(config.checkpoint.dir)));
  }
  const int64_t skipped = samples - std::stoll(loaded->state.at("samples"));
  tokens = std::stoll(loaded->state.at("tokens"));
  done = saved_at = loaded->step;
  observer->rewind(done);
  progress->line(
      format("step {}: rolled back to {} at step {}; its {} samples and those since "
             "then, {} in all, are skipped",
             bad, config::shown_path(loaded->path), done, global_batch, skipped));
  progress->resume();
}

StepMetrics Trainer::State::step() {
  const trace::Span span("train", "step");
  StepClock clock(world);
  std::vector<data::Batch> batches;
  for (int64_t i = 0; i < accumulation; ++i) batches.push_back(reader->next());
  clock.lap(&StepSplit::data_ms);
  const int64_t step_tokens = batches[0].step_inputs;
  const auto targets = static_cast<double>(batches[0].step_targets);
  auto batch = batches.begin();
  optimizer->set_lr(schedule.lr(done));  // before backward, in which parameters may be updated
  const double fault = faults.begin_step(done + 1, model.pipeline());
  // Gradients are averaged over ranks, so each scales by their number to get the batch's mean.
  const at::Tensor losses =
      model.step({.next = [&] { return to_tensors(*batch++, config.train.seq_len, device); },
                  .step = done,
                  .first_micro_batch = dp.rank() * accumulation,
                  .loss_scale = fault * dp.size() / targets});
  const bool looks = health && (done + 1) % config.metrics.health_every == 0;
  if (looks) health->before_update(model.pipeline());
  const double norm = model.clip_grad_norm_(config.optim.clip);
  // Now, while a device has nothing queued: behind the optimizer's work it would be waited for.
  const at::Tensor on_host = losses.to(at::kCPU, at::kDouble);
  clock.lap(&StepSplit::compute_ms, model.pipeline().stats().waited);
  clock.find_update(queued_update.restart());
  StepMetrics result{.step = done + 1, .grad_norm = norm, .lr = schedule.lr(done)};
  result.peak_bytes = peak_bytes(device);
  const auto exchange = [&] {
    return combine(on_host,
                   {.stop = stop.signal() != 0,
                    .busy_ms = clock.split().busy_ms(),
                    .peak_bytes = result.peak_bytes},
                   mesh);
  };
  // The loss must be known before the update only where it decides about it.
  std::optional<StepSums> sums;
  if (config.train.on_spike == config::OnSpike::skip) sums = exchange();
  const bool spike = sums && std::isfinite(norm) && bad_steps.is_spike(sums->loss);
  result.skipped = !guard.step(*optimizer, spike ? std::numeric_limits<double>::infinity() : norm);
  queued_update.end();
  last_step = {.step = done + 1, .nonfinite = result.skipped && !spike};
  if (last_step.nonfinite) last_step.cause = model.nonfinite_cause(on_host, world);
  if (last_step.nonfinite && optimizer->updates_in_backward() &&
      config.train.on_nonfinite != config::OnNonfinite::rollback) {
    throw Error(
        format("the gradients of step {} are not finite, and offload.clip_mode none has "
               "updated with them, because of {}; resume from a checkpoint with a lower optim.lr",
               done + 1, last_step.cause));
  }
  if (looks) observer->event("health", done + 1, health->after_update(model.pipeline()));
  if (done + 1 == measures_at && !config.run.dir.empty())
    measured = measure(device, model, *optimizer, /*has_stepped=*/true);
  optimizer->zero_grad();
  clock.lap(&StepSplit::optimizer_ms);
  if (!sums) sums = exchange();
  clock.lap(&StepSplit::communication_ms);
  ++done;
  faults.end_step(done, [&] { return model.slices(*optimizer); });
  samples += global_batch;
  tokens += step_tokens;
  stopping = sums->stop;
  result.loss = last_step.loss = sums->loss;
  result.busy_ms = std::move(sums->busy_ms);
  result.rank_peak_bytes = std::move(sums->peak_bytes);
  clock.find_stall(*std::ranges::max_element(result.busy_ms));
  result.split = clock.split();
  result.split.checkpoint_ms = std::exchange(saving_ms, 0);
  result.time = seconds_since_1970();
  result.tokens = tokens;
  result.step_ms = clock.step_ms();
  result.tokens_per_s = 1e3 * static_cast<double>(step_tokens) / result.step_ms;
  result.comm_ms = clock.blocked_ms();
  flight::set_step(done, static_cast<int64_t>(1e6 * result.step_ms),
                   static_cast<int64_t>(1e6 * result.comm_ms));
  return result;
}

// Whether the loss is the lowest so far, so that the weights are to be saved.
bool Trainer::State::evaluate() {
  evaluated_at = done;
  if (evaluator.empty()) return false;
  progress->pause();
  flight::set_phase(flight::Phase::evaluating);
  const double loss = evaluator.loss(model);
  progress->line(format("step {}: validation loss {:.4f}, perplexity {:.3f} ({} tokens)", done,
                        loss, std::exp(loss),
                        short_number(static_cast<double>(evaluator.tokens()))));
  observer->evaluation(done, loss);
  if (config.metrics.sample_tokens > 0) {
    const std::string text = sample_text(model, config, data.tokenizer, device, world);
    observer->event("sample", done, {{"prompt", config.metrics.sample_prompt}, {"text", text}});
  }
  flight::set_phase(flight::Phase::training);
  const bool is_best = done > 0 && best.offer(done, loss);
  progress->resume();
  return is_best;
}

void Trainer::State::verify() {
  if (config.train.verify_every == 0 || verified_at == done) return;
  vote.verify(done, model.slices(*optimizer));
  verified_at = done;
}

// Of a slice that several ranks hold one is saved, so they are compared first. Weights of a bad
// step do not push out good ones.
void Trainer::State::save(checkpoint::WhenBusy when_busy) {
  if (!saver) return;
  verify();
  progress->pause();
  const auto start = Clock::now();
  flight::set_phase(flight::Phase::saving);
  auto state = config::state_of(identities);
  state["samples"] = std::to_string(samples);
  state["tokens"] = std::to_string(tokens);
  state["seed"] = std::to_string(config.train.seed);
  state["global_batch"] = std::to_string(global_batch);
  if (!record.tokenizer.empty()) state["tokenizer"] = record.tokenizer;
  best.add_to(state);
  const bool begun =
      saver->save({.step = done,
                   .slices = model.slices(*optimizer),
                   .state = state,
                   .config = record.config,
                   .keep = bad_steps.last_is_bad() ? 0 : static_cast<int>(config.checkpoint.keep),
                   .best = best.step()},
                  when_busy);
  if (begun) {
    saved_at = done;
  } else {
    progress->line(
        format("step {}: not saved, that of step {} is still being written", done, saved_at));
  }
  say_what_was_saved();
  flight::set_phase(flight::Phase::training);
  saving_ms += 1e3 * seconds_since(start);
  progress->resume();
}

void Trainer::State::say_what_was_saved() {
  if (!saver) return;
  for (const checkpoint::SaveResult& saved : saver->take_finished()) {
    if (saved.path.empty()) best.not_saved(saved.step);
    if (saved.path.empty()) continue;  // of a failure there was a warning
    flight::set_saved(saved.step);
    observer->event("saved", saved.step,
                    {{"path", config::shown_path(saved.path)},
                     {"seconds", saved.seconds},
                     {"waited", saved.waited}});
    const std::string waited =
        config.checkpoint.async ? format(", training waited {:.2f} s", saved.waited) : "";
    progress->line(format("step {}: saved {} ({:.1f} s{})", saved.step,
                          config::shown_path(saved.path), saved.seconds, waited));
  }
}

TrainingResult Trainer::State::run() {
  if (world.rank() == 0) {
    for (const std::string& line :
         start_lines({config, world, model, data, threads, device, global_batch, accumulation,
                      reader->samples(), resumed_from, done}))
      progress->line(line);
    warn_of_data(data, config);
  }
  flight::set_phase(flight::Phase::training);
  // A signal may have come to one rank before the first step.
  stopping = combine(at::empty({0}, at::kDouble), {.stop = stop.signal() != 0}, mesh).stop;
  observer->event("started", done,
                  {{"ranks", world.size()}, {"resumed_from", config::shown_path(resumed_from)}});
  const auto due = [&](int64_t every) { return every > 0 && done % every == 0; };
  if (done == 0 && config.evaluates_first() && !stopping) evaluate();
  while (done < config.train.steps && !stopping) {
    const StepMetrics result = step();
    observer->step(result);
    if (measured) {
      observer->ranks(done, *measured, predicted(config, world), model.pipeline());
      measured.reset();
    }
    progress->step(result, observer->slow());
    // A corrupt weight may be the cause of a bad step, and ten of these end the run.
    if (due(config.train.verify_every) || bad_steps.is_bad(last_step)) verify();
    if (bad_steps.must_roll_back(last_step)) {
      roll_back();
      continue;
    }
    if (due(config.train.eval_every) && evaluate()) save(checkpoint::WhenBusy::wait);
    // Weights of a bad step must not replace good ones.
    const bool last = stopping || done == config.train.steps;
    if (!last && saved_at != done && due(config.checkpoint.every) && !bad_steps.last_is_bad()) {
      save(config.checkpoint.when_busy == config::WhenBusy::skip ? checkpoint::WhenBusy::skip
                                                                 : checkpoint::WhenBusy::wait);
    }
    say_what_was_saved();
  }
  // The last weights may be the best, of which the last checkpoint must know.
  const bool finished = done >= config.train.steps;
  const bool is_best = finished && config.checkpoint.best && evaluated_at != done && evaluate();
  if (is_best || saved_at != done) save(checkpoint::WhenBusy::wait);
  if (saver) saver->wait();
  say_what_was_saved();
  if (const std::string line = best.describe(); !line.empty()) progress->line(line);
  if (!finished) {
    progress->line(format("stopped at step {} of {}", done, config.train.steps));
    observer->event("stopped", done);
    return TrainingResult::stopped;
  }
  if (evaluated_at != done) evaluate();
  observer->event("finished", done);
  return TrainingResult::finished;
}

Trainer::Trainer(config::TrainConfig config, comm::Group group) {
  try {
    state_ = std::make_unique<State>(config, group);
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) throw;
    const TrainConfig known = completed(config, config::open_tokenizer(config));
    const int64_t peak = peak_tensor_bytes(choose_device(config, group), nullptr);
    throw Error(out_of_memory_message(
        error, {group.rank(), predicted(known, group), {.activations = peak}}));
  }
}

Trainer::~Trainer() = default;

TrainingResult Trainer::run() {
  try {
    return state_->run();
  } catch (const std::exception& error) {
    state_->observer->event("failed", state_->done, {{"text", error.what()}});
    if (!is_out_of_memory(error)) throw;
    const plan::Memory measured =
        measure(state_->device, state_->model, *state_->optimizer, state_->done > 0);
    throw Error(out_of_memory_message(
        error, {state_->world.rank(), predicted(state_->config, state_->world), measured}));
  }
}

}  // namespace lockstep::train

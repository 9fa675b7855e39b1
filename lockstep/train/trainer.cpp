// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/nn/linear.h"
#include "lockstep/train/batches.h"
#include "lockstep/train/checkpoints/named_checkpoint.h"
#include "lockstep/train/data_report.h"
#include "lockstep/train/device/threads.h"
#include "lockstep/train/setup/run_parts.h"
#include "lockstep/train/start_lines.h"
#include "lockstep/train/step_sums.h"
#include "lockstep/train/text_sample.h"
#include "lockstep/train/trainer_state.h"

namespace lockstep::train {
using config::TrainConfig;

Trainer::State::State(TrainConfig given, comm::Group group)
    : world(std::move(group)),
      data(config::open_data(given)),
      config(fitted(completed(std::move(given), data.tokenizer), world)),
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
                 .device = device,
                 .context = model.context(),
                 .replica = model.replica()}),
      best(config.checkpoint, measure_of(evaluator.tokens(), data, config), world),
      faults(world.rank(), world.size()),
      vote(world, config.train.on_corruption),
      bad_steps(config.train, world.rank() == 0) {
  nn::time_products(device.is_cuda() && config.train.time_products && !config.train.reproducible);
  config.require_graphs(device.is_cuda(), data.train.has_examples());
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
                                             .dp = dp.size() / config.parallel.cp,
                                             .dp_rank = model.replica(),
                                             .seed = static_cast<uint64_t>(config.train.seed),
                                             .vocab = config.model.vocab,
                                             .first_sample = samples,
                                             .step_rows = global_batch});
  if (saver) saver->reserve(model.slices(*optimizer));
  commit_start(config, world);
  observer.emplace(config, world, done);
  if (config.metrics.health_every > 0) health.emplace(config.model);
  measures_at = std::min(done + 3, config.train.steps);
  progress.emplace(world.rank() == 0, done, config.train.steps, config.train.log_every);
}

// At most one step before what the ranks had reached when one of them was lost.
bool Trainer::State::resume_from_memory() {
  if (config.run.recovery != config::Recovery::memory) return false;
  CopyMemory memory;
  comm::run_on_all_ranks("recovery", world, [&]() -> std::string {
    memory = CopyMemory::of_launcher();
    return "";
  });
  copies.emplace(
      world, memory, copy_identity(config, identities, world),
      [this] { return model.slices(*optimizer); },
      MemoryCopies::Options{.at_once = config.offload.any(),
                            .verifies = config.train.verify_every > 0});
  const auto restored = copies->restore();
  if (!restored) return false;
  resumed_from = "memory";
  take_over(restored->step, restored->state, restored->step);
  bad_steps.restore(restored->state.at("bad_steps"));
  saved_at = has_checkpoint(config, done, world) ? done : -1;
  return true;
}

void Trainer::State::take_over(int64_t step, const std::map<std::string, std::string>& state,
                               std::optional<int64_t> unsaved) {
  done = step;
  samples = std::stoll(state.at("samples"));
  if (const auto seen = state.find("tokens"); seen != state.end())
    tokens = std::stoll(seen->second);
  best.restore(state, unsaved);
}

void Trainer::State::keep_copy() {
  if (!copies) return;
  const auto start = Clock::now();
  std::map<std::string, std::string> state{{"samples", std::to_string(samples)},
                                           {"tokens", std::to_string(tokens)},
                                           {"bad_steps", bad_steps.state()}};
  best.add_to(state);
  copies->begin(done, state);
  saving_ms += 1e3 * seconds_since(start);
}

void Trainer::State::resume() {
  if (resume_from_memory()) return;
  const std::string& name = config.checkpoint.resume;
  if (name == "none") return;
  const bool goes_on = config.checkpoint.load == config::LoadWhat::all;
  const auto slices = goes_on ? model.slices(*optimizer) : model.slices();
  checkpoint::LoadOptions options = load_options(config);
  if (!goes_on) options.may_ignore = {"optim."};
  const auto loaded = name == "auto"
                          ? checkpoint::load_newest(config.checkpoint.dir, slices, world, options)
                          : std::optional(load_named(name, slices, world, options));
  if (!loaded) return;
  resumed_from = loaded->path;
  if (!goes_on) return;
  config::require_same_data({.state = loaded->state, .config = loaded->config}, identities, config,
                            loaded->path, world.rank() == 0);
  if (!loaded->state.contains("samples")) {
    throw CheckpointError(
        format("{} was not written by lockstep train: it does not say how much of "
               "the data was seen",
               loaded->path));
  }
  take_over(loaded->step, loaded->state);
  saved_at = config.checkpoint.resume == "auto" ? done : -1;
}

// The reader is not moved: the samples since the checkpoint are not seen again.
void Trainer::State::roll_back() {
  progress->pause();
  const int64_t bad = done;
  if (copies) copies->forget();  // those of steps that are taken back
  try {
    saver->wait();
  } catch (const CommError&) {
    throw;
  } catch (const Error&) {  // there was a warning, and an older checkpoint will do
  }
  say_what_was_saved();
  const auto loaded = checkpoint::load_newest(config.checkpoint.dir, model.slices(*optimizer),
                                              world, load_options(config));
  if (!loaded) {
    throw Error(format("step {} is to be rolled back, but {} has no checkpoint yet", bad,
                       config::shown_path(config.checkpoint.dir)));
  }
  const int64_t skipped = samples - std::stoll(loaded->state.at("samples"));
  tokens = std::stoll(loaded->state.at("tokens"));
  done = saved_at = loaded->step;
  verified_at = -1;
  observer->rewind(done);
  progress->line(
      format("step {}: rolled back to {} at step {}; its {} samples and those since "
             "then, {} in all, are skipped",
             bad, config::shown_path(loaded->path), done, global_batch, skipped));
  keep_copy();
  progress->resume();
}

// What can be continued from nowhere is not ended.
Stop Trainer::State::possible(Stop asked) const {
  return asked == Stop::resize && !copies && !saver ? Stop::none : asked;
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
  try {
    const bool repaired = vote.verify(done, model.slices(*optimizer));
    if (copies) repaired ? copies->distrust() : copies->verified();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    if (copies) copies->distrust();
    throw;
  }
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
  stopping = possible(combine(at::empty({0}, at::kDouble), {.stop = stop.asked()}, mesh).stop);
  observer->event("started", done,
                  {{"ranks", world.size()}, {"resumed_from", config::shown_path(resumed_from)}});
  const auto due = [&](int64_t every) { return every > 0 && done % every == 0; };
  if (done == 0 && config.evaluates_first() && stopping == Stop::none) evaluate();
  // It may have been cut off.
  const bool was_due = due(config.checkpoint.every) && !bad_steps.last_is_bad();
  if (resumed_from == "memory" && done > 0 && saved_at != done &&
      (was_due || best.step() == done)) {
    save(checkpoint::WhenBusy::wait);
  }
  keep_copy();
  while (done < config.train.steps && stopping == Stop::none) {
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
    const bool last = stopping == Stop::end || done == config.train.steps;
    if (!last && saved_at != done && due(config.checkpoint.every) && !bad_steps.last_is_bad()) {
      save(config.checkpoint.when_busy == config::WhenBusy::skip ? checkpoint::WhenBusy::skip
                                                                 : checkpoint::WhenBusy::wait);
    }
    say_what_was_saved();
    keep_copy();
  }
  if (copies) copies->wait();
  // The last weights may be the best, of which the last checkpoint must know.
  const bool finished = done >= config.train.steps;
  const bool is_best = finished && config.checkpoint.best && evaluated_at != done && evaluate();
  const bool copied = stopping == Stop::resize && copies && !finished;
  if (is_best || (saved_at != done && !copied)) save(checkpoint::WhenBusy::wait);
  if (saver) saver->wait();
  say_what_was_saved();
  if (const std::string line = best.describe(); !line.empty()) progress->line(line);
  if (!finished) {
    progress->line(format("stopped at step {} of {}{}", done, config.train.steps,
                          stopping == Stop::resize ? ", to continue on more ranks" : ""));
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

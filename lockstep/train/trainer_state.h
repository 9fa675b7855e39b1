// SPDX-License-Identifier: Apache-2.0
// What a trainer has and does: trainer.cpp has the loop, trainer_step.cpp one step. Private: not
// installed.
#pragma once

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/background_saver.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/config/input_files.h"
#include "lockstep/data/batch_reader.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/mesh/mesh.h"
#include "lockstep/optim/lr_schedule.h"
#include "lockstep/optim/step_guard.h"
#include "lockstep/train/checkpoints/best_checkpoint.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/evaluator.h"
#include "lockstep/train/integrity/bad_steps.h"
#include "lockstep/train/integrity/fault_injection.h"
#include "lockstep/train/integrity/state_vote.h"
#include "lockstep/train/memory_report.h"
#include "lockstep/train/observe/health.h"
#include "lockstep/train/observe/run_observer.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/recovery/memory_copies.h"
#include "lockstep/train/run_record.h"
#include "lockstep/train/stop_request.h"
#include "lockstep/train/trained_model.h"
#include "lockstep/train/trainer.h"

namespace lockstep::train {

struct Trainer::State {
  State(config::TrainConfig given, comm::Group group);
  ~State() { flight::set_phase(flight::Phase::ended); }

  void resume();
  bool resume_from_memory();
  void take_over(int64_t step, const std::map<std::string, std::string>& state,
                 std::optional<int64_t> unsaved = std::nullopt);
  void keep_copy();
  void roll_back();
  TrainingResult run();
  struct Gradients {
    at::Tensor losses;  // of the micro-batches, on the CPU
    double norm;
  };
  Gradients compute(const std::vector<data::Batch>& batches);
  Gradients compute_again(const std::vector<data::Batch>& batches, const std::string& cause);
  StepMetrics step();
  void verify();
  bool looks_at(int64_t step) const { return health && step % config.metrics.health_every == 0; }
  Stop possible(Stop asked) const;
  bool evaluate();
  void save(checkpoint::WhenBusy when_busy);
  void say_what_was_saved();

  StopRequest stop;  // first: a signal may come while the rest is made
  const comm::Group world;
  const config::Data data;
  const config::TrainConfig config;
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
  std::optional<MemoryCopies> copies;
  int64_t done = 0;                 // steps
  int64_t samples = 0, tokens = 0;  // that these steps have seen
  int64_t saved_at = -1, evaluated_at = -1, verified_at = -1;
  Stop stopping = Stop::none;
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

}  // namespace lockstep::train

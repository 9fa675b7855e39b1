// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/observe/run_observer.h"

#include <array>
#include <chrono>
#include <cmath>

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/parallel/pipeline/timeline.h"
#include "lockstep/schedule/render/render.h"

namespace lockstep::train {
namespace {

using ObservedJson = io::OrderedJson;

constexpr double kCommunicationEvery = 10, kSlowEvery = 60;  // seconds
constexpr size_t kMostActions = 4096;  // of a rank, in the picture of a pipeline

double rounded_ms(double value) { return std::round(value * 1e3) / 1e3; }

std::string text_of(const ObservedJson& json) {
  // Paths and samples of text may have bytes that are not UTF-8.
  return json.dump(-1, ' ', false, ObservedJson::error_handler_t::replace);
}

ObservedJson json_of(const plan::Memory& memory) {
  return {{"parameters", memory.parameters}, {"gradients", memory.gradients},
          {"optimizer", memory.optimizer},   {"activations", memory.activations},
          {"buffers", memory.buffers},       {"on_host", memory.on_host},
          {"on_disk", memory.on_disk}};
}

// Name, start and end of each computation, in microseconds of the wall clock.
ObservedJson json_of(std::span<const parallel::TimedAction> timeline) {
  using std::chrono::microseconds;
  const auto offset = std::chrono::system_clock::now().time_since_epoch() -
                      std::chrono::duration_cast<std::chrono::system_clock::duration>(
                          Clock::now().time_since_epoch());
  const auto wall = [&](Clock::time_point time) {
    return std::chrono::duration_cast<microseconds>(time.time_since_epoch() + offset).count();
  };
  ObservedJson actions = ObservedJson::array();
  for (const parallel::TimedAction& timed : timeline)
    actions.push_back({schedule::name_of(timed.action, 2), wall(timed.start), wall(timed.end)});
  return actions;
}

}  // namespace

RunObserver::RunObserver(const config::TrainConfig& config, comm::Group world, int64_t first_step)
    : metrics_path_(world.rank() == 0 ? config.metrics.file : ""),
      world_(std::move(world)),
      metrics_(std::in_place, metrics_path_, first_step),
      last_step_(first_step),
      operations_written_(seconds_since_1970()) {
  if (flight::page() != nullptr) operations_.read(*flight::page());  // of starting and loading
  operations_.take();
  if (world_.rank() != 0) return;
  try {
    if (!config.run.dir.empty()) events_ = io::LineFile(config.run.dir + "/events.jsonl");
    if (!config.metrics.tensorboard.empty())
      tensorboard_ = io::TensorboardFile(config.metrics.tensorboard);
  } catch (const SystemError& failure) {
    throw ConfigError(std::string(failure.what()) + "; choose another place");
  }
  if (events_.is_open()) {
    log::observe_warnings([this](const std::string& text) {
      event("warning", last_step_, {{"text", text}});
    });
  }
}

RunObserver::~RunObserver() {
  if (!events_.is_open()) return;
  log::observe_warnings(nullptr);
  communication(last_step_);
}

void RunObserver::event(std::string_view name, int64_t step, const ObservedJson& fields) {
  if (!events_.is_open()) return;
  ObservedJson line{{"event", name}, {"step", step}, {"time", rounded_ms(seconds_since_1970())}};
  if (!fields.is_null()) line.update(fields);
  events_.write(text_of(line));
}

void RunObserver::step(const StepMetrics& metrics) {
  last_step_ = metrics.step;
  std::vector<int64_t> busy;
  for (const double each : metrics.busy_ms) busy.push_back(static_cast<int64_t>(each * 1e6));
  slow_ = judge_.judge(busy);
  if (world_.rank() != 0) return;
  metrics_->write(metrics);
  const std::array<io::TensorboardFile::Scalar, 6> scalars{
      {{"train/loss", metrics.loss},
       {"train/grad_norm", metrics.grad_norm},
       {"train/lr", metrics.lr},
       {"speed/tokens_per_s", metrics.tokens_per_s},
       {"speed/step_ms", metrics.step_ms},
       {"memory/peak_bytes", static_cast<double>(metrics.peak_bytes)}}};
  tensorboard_.write(metrics.step, metrics.time, scalars);
  if (metrics.skipped) event("skipped", metrics.step);
  for (const flight::SlowRank& slow : slow_) {
    double& said = said_slow_[slow.rank];
    if (metrics.time - said < kSlowEvery) continue;
    said = metrics.time;
    event("slow", metrics.step,
          {{"rank", slow.rank},
           {"busy_ms", rounded_ms(static_cast<double>(slow.busy_ns) / 1e6)},
           {"usual_ms", rounded_ms(static_cast<double>(slow.usual_ns) / 1e6)}});
  }
  ++steps_of_operations_;
  if (events_.is_open() && flight::page() != nullptr) operations_.read(*flight::page());
  if (metrics.time - operations_written_ >= kCommunicationEvery) communication(metrics.step);
}

void RunObserver::communication(int64_t step) {
  operations_written_ = seconds_since_1970();
  ObservedJson kinds;
  for (const auto& [name, total] : operations_.take()) {
    kinds[name] = {{"count", total.count},
                   {"bytes", total.bytes},
                   {"flight_ms", rounded_ms(static_cast<double>(total.flight_ns) / 1e6)},
                   {"waited_ms", rounded_ms(static_cast<double>(total.waited_ns) / 1e6)}};
  }
  const int64_t steps = std::exchange(steps_of_operations_, 0);
  if (!kinds.empty() && steps > 0)
    event("communication", step, {{"steps", steps}, {"operations", std::move(kinds)}});
}

void RunObserver::evaluation(int64_t step, double loss) {
  const double time = seconds_since_1970();
  metrics_->write_evaluation(step, loss, time);
  const std::array<io::TensorboardFile::Scalar, 1> scalar{{{"validation/loss", loss}}};
  tensorboard_.write(step, time, scalar);
}

void RunObserver::rewind(int64_t step) {
  event("rolled back", last_step_, {{"to", step}});
  last_step_ = step;
  metrics_.reset();
  metrics_.emplace(metrics_path_, step);
}

void RunObserver::ranks(int64_t step, const plan::Memory& measured, const plan::Memory& planned,
                        const parallel::Pipeline& pipeline) {
  const schedule::Schedule& schedule = pipeline.schedule();
  ObservedJson mine{{"memory", json_of(measured)}, {"plan", json_of(planned)}};
  const mesh::Mesh& mesh = pipeline.mesh();
  const auto coordinate = mesh.coordinate_of(mesh.group().rank()).value();
  const auto names = mesh.axis_names();
  bool first = true;  // of the ranks that compute the same stages
  for (size_t i = 0; i < names.size(); ++i) {
    mine[names[i]] = coordinate[i];
    first = first && (names[i] == "pp" || coordinate[i] == 0);
  }
  if (schedule.ranks > 1 && first && pipeline.timeline().size() <= kMostActions)
    mine["actions"] = json_of(pipeline.timeline());
  const auto texts = comm::gather_texts(text_of(mine), world_);
  ObservedJson fields{{"ranks", ObservedJson::array()}};
  for (const std::string& text : texts) fields["ranks"].push_back(ObservedJson::parse(text));
  if (schedule.ranks > 1) fields["schedule"] = schedule::to_csv(schedule);
  event("ranks", step, fields);
}

}  // namespace lockstep::train

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/batch_reader.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {
namespace {

void check_plan(const BatchPlan& plan, int64_t depth) {
  const std::pair<const char*, int64_t> positive[] = {{"seq_len", plan.seq_len},
                                                      {"micro_batch", plan.micro_batch},
                                                      {"accumulation", plan.accumulation},
                                                      {"dp", plan.dp},
                                                      {"vocab", plan.vocab},
                                                      {"depth", depth}};
  for (const auto& [name, value] : positive) {
    if (value < 1) throw ConfigError(format("batches: {} is {}, must be at least 1", name, value));
  }
  if (plan.dp_rank < 0 || plan.dp_rank >= plan.dp) {
    throw ConfigError(format("batches: dp_rank is {}, must be in [0, {})", plan.dp_rank, plan.dp));
  }
  if (plan.first_sample < 0) {
    throw ConfigError(format("batches: first_sample is {}, must be at least 0", plan.first_sample));
  }
  if (plan.step_rows < 0 || plan.step_rows > plan.all_rows() ||
      plan.step_rows % plan.micro_batch != 0) {
    throw ConfigError(
        format("batches: step_rows is {}, must be a multiple of micro_batch {} and at most "
               "micro_batch x accumulation {} x dp {} = {}, or 0",
               plan.step_rows, plan.micro_batch, plan.accumulation, plan.dp, plan.all_rows()));
  }
}

Sampler sampler_for(const Corpus& corpus, const BatchPlan& plan) {
  const int64_t samples = sample_count(corpus, plan.seq_len);
  if (samples < 1 && corpus.has_examples())
    throw ConfigError("the data has no example whose completion begins within seq_len");
  if (samples < 1) {
    throw ConfigError(
        format("the data has {} tokens, one sample needs seq_len + 1 = {}; add data or shorten "
               "seq_len",
               corpus.size(), plan.seq_len + 1));
  }
  return {samples, plan.seed};
}

}  // namespace

std::optional<int64_t> BatchPlan::sample_position(int64_t batch, int64_t row) const {
  const int64_t step = batch / accumulation, of_step = batch % accumulation;
  const int64_t in_step = (dp_rank * accumulation + of_step) * micro_batch + row;
  if (in_step >= global_batch()) return std::nullopt;
  return first_sample + step * global_batch() + in_step;
}

struct BatchReader::State {
  State(Corpus data, const BatchPlan& what, int64_t most)
      : corpus(std::move(data)),
        plan(what),
        depth(static_cast<size_t>(most)),
        sampler(sampler_for(corpus, plan)),
        thread([this](const std::stop_token& stop) { run(stop); }) {}

  // Every rank knows the samples of all ranks, so none has to ask.
  void count_step(int64_t step) {
    const int64_t rows = plan.global_batch();
    step_targets = step_inputs = rows * plan.seq_len;
    if (!corpus.has_examples()) return;
    step_targets = step_inputs = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const SampleSize size =
          sample_size(corpus, sampler(plan.first_sample + step * rows + i), plan.seq_len);
      step_targets += size.targets;
      step_inputs += size.inputs;
    }
  }

  Batch read(int64_t number) {
    if (number % plan.accumulation == 0) count_step(number / plan.accumulation);
    Batch batch{.step_targets = step_targets, .step_inputs = step_inputs};
    batch.input.reserve(static_cast<size_t>(plan.micro_batch * plan.seq_len));
    batch.target.reserve(batch.input.capacity());
    for (int64_t row = 0; row < plan.micro_batch; ++row) {
      const std::optional<int64_t> position = plan.sample_position(number, row);
      batch.add_sample(corpus, position ? std::optional(sampler(*position)) : std::nullopt,
                       {.seq_len = plan.seq_len, .vocab = plan.vocab});
    }
    return batch;
  }

  void run(const std::stop_token& stop) {
    try {
      for (int64_t number = 0; !stop.stop_requested(); ++number) {
        Batch batch = read(number);
        std::unique_lock lock(mutex);
        if (!changed.wait(lock, stop, [&] { return ready.size() < depth; })) return;
        ready.push_back(std::move(batch));
        changed.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      changed.notify_all();
    }
  }

  const Corpus corpus;
  const BatchPlan plan;
  const size_t depth;
  const Sampler sampler;
  int64_t step_targets = 0, step_inputs = 0;  // of the step that is being read
  std::mutex mutex;
  std::condition_variable_any changed;
  std::deque<Batch> ready;
  std::exception_ptr failure;
  std::jthread thread;  // last: it uses all the others
};

BatchReader::BatchReader(Corpus corpus, const BatchPlan& plan, int64_t depth) {
  check_plan(plan, depth);
  state_ = std::make_unique<State>(std::move(corpus), plan, depth);
}

BatchReader::~BatchReader() = default;
BatchReader::BatchReader(BatchReader&&) noexcept = default;
BatchReader& BatchReader::operator=(BatchReader&&) noexcept = default;

// Waits without a deadline: the thread reads memory and always comes back, with a batch or an
// error.
Batch BatchReader::next() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.changed.wait(lock, [&] { return !state.ready.empty() || state.failure; });
  if (state.ready.empty()) std::rethrow_exception(state.failure);
  Batch batch = std::move(state.ready.front());
  state.ready.pop_front();
  state.changed.notify_all();
  return batch;
}

int64_t BatchReader::samples() const { return state_->sampler.samples(); }

}  // namespace lockstep::data

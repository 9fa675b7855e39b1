// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/philox.h"
#include "lockstep/model/sampling.h"
#include "lockstep/model/text_model.h"

namespace lockstep::model {
namespace {

// A text that is being written, in a row of the cache.
struct Row {
  size_t request = 0;
  std::vector<int64_t> text = {};  // with the prompt
  int64_t seen = 0;                // tokens of the text before those that are in the cache
  int64_t cached = 0;
  int64_t drawn = 0;

  int64_t size() const { return static_cast<int64_t>(text.size()); }
};

// Which text a span of a step is of, and whether a token is drawn after it.
struct Reader {
  Row* row;
  bool draws;
};

class Writer {
 public:
  Writer(TextModel& model, std::span<const TextRequest> requests, const TextOptions& options,
         const std::function<bool(const NewToken&)>& emit)
      : model_(model), requests_(requests), options_(options), emit_(emit) {}

  void run() {
    const auto rows = std::min<int64_t>(options_.rows, static_cast<int64_t>(requests_.size()));
    const int64_t chunk =
        std::min(options_.chunk > 0 ? options_.chunk : model_.chunk(), options_.positions);
    model_.reset({.rows = rows, .capacity = longest_text(), .longest = chunk});
    rows_.resize(static_cast<size_t>(rows));
    while (true) {
      admit();
      for (size_t i = 0; i < rows_.size(); ++i) {
        if (rows_[i]) add_spans(i, chunk);
      }
      if (steps_.empty()) return;
      compute();
    }
  }

 private:
  int64_t longest_text() const {
    size_t longest = 0;
    for (const TextRequest& request : requests_) longest = std::max(longest, request.prompt.size());
    return std::min(options_.positions, static_cast<int64_t>(longest) + options_.generate.tokens);
  }

  void admit() {
    for (auto& row : rows_) {
      if (row || next_ == requests_.size()) continue;
      row.emplace(Row{.request = next_, .text = requests_[next_].prompt});
      ++next_;
    }
  }

  // A prompt is computed in chunks, each a step of its own, so that the result does not depend on
  // other texts. Single tokens of several texts are computed together.
  void add_spans(size_t index, int64_t chunk) {
    Row& row = *rows_[index];
    if (row.size() - row.seen > options_.positions) {
      row.seen = row.size() - options_.positions / 2;
      row.cached = 0;
    }
    const int64_t end = row.size() - row.seen;
    const bool alone = end - row.cached > 1 || row.cached == 0;
    while (row.cached < end) {
      const int64_t count = std::min(chunk, end - row.cached);
      TextStep& step = alone ? add_step() : step_for_one();
      step.spans.push_back({static_cast<int64_t>(index), row.cached, count});
      const auto first = row.text.begin() + row.seen + row.cached;
      step.tokens.insert(step.tokens.end(), first, first + count);
      row.cached += count;
      readers_[static_cast<size_t>(&step - steps_.data())].push_back({&row, row.cached == end});
    }
  }

  TextStep& add_step() {
    readers_.emplace_back();
    return steps_.emplace_back();
  }
  // Texts take turns, so that all stages of a pipeline have something to do.
  TextStep& step_for_one() {
    if (singles_.size() < static_cast<size_t>(model_.steps_at_once())) {
      singles_.push_back(steps_.size());
      return add_step();
    }
    std::rotate(singles_.begin(), singles_.begin() + 1, singles_.end());
    return steps_[singles_.back()];
  }

  // Of each span: the token, its logarithm, and those of the most likely ones.
  int64_t width() const { return 2 + 2 * std::max<int64_t>(options_.top, 0); }
  int64_t vocab() const {
    return options_.generate.vocab > 0 ? options_.generate.vocab
                                       : std::numeric_limits<int64_t>::max();
  }
  // The model finds the token itself.
  bool is_plain() const {
    return options_.generate.temperature == 0 && options_.generate.repetition_penalty == 1 &&
           options_.top < 0;
  }

  std::vector<double> read(size_t step, const at::Tensor& logits) const {
    std::vector<double> numbers;
    for (size_t i = 0; i < readers_[step].size(); ++i) {
      const auto& [row, draws] = readers_[step][i];
      std::vector<double> record(static_cast<size_t>(width()));
      if (draws && is_plain()) {
        record[0] = logits.data_ptr<float>()[i];
      } else if (draws) {
        const auto line = static_cast<int64_t>(i) * logits.size(1);
        draw_one(*row, {logits.data_ptr<float>() + line, static_cast<size_t>(logits.size(1))},
                 record);
      }
      numbers.insert(numbers.end(), record.begin(), record.end());
    }
    return numbers;
  }

  void draw_one(const Row& row, std::span<const float> logits, std::vector<double>& record) const {
    const GenerateOptions& options = options_.generate;
    logits = logits.first(std::min(logits.size(), static_cast<size_t>(vocab())));
    std::vector<float> scores(logits.begin(), logits.end());
    penalize(scores, row.text, options.repetition_penalty);
    const RandomKey key =
        random_key(options.seed, "generate", "",
                   {.step = row.drawn, .micro_batch = requests_[row.request].stream});
    const int64_t token = draw(scores, options, uniform(key, 0));
    record[0] = static_cast<double>(token);
    if (options_.top < 0) return;
    const LogProbabilities log = log_probabilities(logits, token, options_.top);
    record[1] = log.token;
    for (size_t i = 0; i < log.top.size(); ++i) {
      record[2 + 2 * i] = static_cast<double>(log.top[i].token);
      record[3 + 2 * i] = log.top[i].probability;
    }
  }

  void compute() {
    const auto results = model_.run(
        steps_,
        {.read = [this](size_t step, const at::Tensor& logits) { return read(step, logits); },
         .count = width(),
         .most_likely_of = is_plain() ? vocab() : 0});
    for (size_t step = 0; step < steps_.size(); ++step) {
      for (size_t i = 0; i < readers_[step].size(); ++i) {
        if (readers_[step][i].draws)
          take(*readers_[step][i].row, results[step].data() + i * static_cast<size_t>(width()));
      }
    }
    steps_.clear();
    readers_.clear();
    singles_.clear();
  }

  void take(Row& row, const double* record) {
    NewToken token{.request = row.request,
                   .index = row.drawn,
                   .log = {.token = record[1]},
                   .token = static_cast<int64_t>(record[0])};
    for (int64_t i = 0; i < options_.top; ++i)
      token.log.top.push_back({static_cast<int64_t>(record[2 + 2 * i]), record[3 + 2 * i]});
    row.text.push_back(token.token);
    ++row.drawn;
    if (emit_(token) && row.drawn < options_.generate.tokens) return;
    for (auto& each : rows_) {
      if (each && &*each == &row) {
        each.reset();
        return;
      }
    }
  }

  TextModel& model_;
  std::span<const TextRequest> requests_;
  const TextOptions& options_;
  const std::function<bool(const NewToken&)>& emit_;
  std::vector<std::optional<Row>> rows_;
  size_t next_ = 0;  // request
  std::vector<TextStep> steps_;
  std::vector<std::vector<Reader>> readers_;  // of each step's spans
  std::vector<size_t> singles_;               // steps of single tokens
};

}  // namespace

void generate_texts(TextModel& model, std::span<const TextRequest> requests,
                    const TextOptions& options, const std::function<bool(const NewToken&)>& emit) {
  validate(options.generate);
  for (const TextRequest& request : requests) {
    const auto size = static_cast<int64_t>(request.prompt.size());
    if (size < 1 || size >= options.positions) {
      throw ConfigError(
          format("[generate] the prompt has {} tokens, must have at least 1 and fewer than the "
                 "model's {} positions",
                 size, options.positions));
    }
  }
  if (options.generate.tokens > 0 && !requests.empty())
    Writer(model, requests, options, emit).run();
}

void generate(LanguageModelImpl& model, std::vector<int64_t> prompt, const GenerateOptions& options,
              const std::function<bool(int64_t token)>& emit) {
  for (const int64_t token : prompt) {
    if (token < 0 || token >= model.spec().vocab) {
      throw ConfigError(format("[generate] the prompt has a token {}, the model's vocabulary {}",
                               token, model.spec().vocab));
    }
  }
  const TextRequest request{.prompt = std::move(prompt)};
  generate_texts(*text_model(model), {&request, 1},
                 {.generate = options, .positions = model.spec().positions, .rows = 1},
                 [&](const NewToken& token) { return emit(token.token); });
}

}  // namespace lockstep::model

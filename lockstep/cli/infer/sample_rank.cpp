// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "lockstep/cli/infer/infer_rank.h"
#include "lockstep/cli/infer/loaded_model.h"
#include "lockstep/cli/infer/sample_options.h"
#include "lockstep/cli/infer/text_stream.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::cli {
namespace {

using Json = nlohmann::ordered_json;

// False where the reader has gone.
bool write_out(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

std::string line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

// A text that is being generated.
struct Output {
  size_t prompt = 0;   // which one
  int64_t sample = 0;  // which one of it
  TextStream stream;
  std::vector<int64_t> tokens = {};
  Json logs = Json::array();
  const char* finish = "length";
};

class Sampler {
 public:
  Sampler(const SampleOptions& options, LoadedModel& model, const config::ModelSpec& spec,
          const ModelTokenizer& tokenizer)
      : options_(options),
        model_(model),
        spec_(spec),
        tokenizer_(tokenizer.tokenizer),
        prompts_(shared_prompts()) {
    // Ids of the model's files are those of its own tokenizer.
    if (options.model.tokenizer.empty()) {
      for (const int64_t id : data::eos_token_ids(tokenizer.files.generation_config))
        ends_.insert(id);
    }
    if (const auto end = tokenizer_.end_of_text()) ends_.insert(*end);
    if (options.ignore_eos) ends_.clear();
  }

  void run() {
    make_requests();
    speaks_ = model_.world.rank() == 0;
    streams_ = !options_.json && prompts_.size() * static_cast<size_t>(options_.samples) == 1;
    if (streams_) say(prompts_[0]);
    started_ = Clock::now();
    model::generate_texts(
        *model_.text, requests_,
        {.generate = {.tokens = options_.tokens,
                      .temperature = options_.temperature,
                      .top_k = options_.top_k,
                      .top_p = options_.top_p,
                      .min_p = options_.min_p,
                      .repetition_penalty = options_.repetition_penalty,
                      .seed = static_cast<uint64_t>(options_.seed),
                      .vocab = tokenizer_.vocab_size()},
         .positions = spec_.positions,
         .rows = options_.rows,
         .top = std::clamp<int64_t>(options_.logprobs, -1,
                                    std::min<int64_t>(spec_.vocab, tokenizer_.vocab_size()))},
        [this](const model::NewToken& token) { return take(token); });
    const double seconds = seconds_since(started_);
    for (Output& output : outputs_) show(output.stream.finish());
    if (streams_) {
      say("\n");
    } else {
      say_all(seconds);
    }
  }

 private:
  // Rank 0 reads them for all: standard input is its own.
  std::vector<std::string> shared_prompts() const {
    const auto texts = comm::run_on_all_ranks("prompts", model_.world, [&]() -> std::string {
      if (model_.world.rank() != 0) return {};
      return Json(read_prompts(options_)).dump(-1, ' ', false, Json::error_handler_t::replace);
    });
    return Json::parse(texts[0]).get<std::vector<std::string>>();
  }

  void make_requests() {
    const comm::Group dp = model_.model.mesh()["dp"];
    const size_t groups = model_.splits ? static_cast<size_t>(dp.size()) : 1;
    size_t index = 0;
    bool warned = false;  // of the first that is too long
    for (size_t prompt = 0; prompt < prompts_.size(); ++prompt) {
      const auto tokens = tokenizer_.encode(prompts_[prompt]);
      const auto size = static_cast<int64_t>(tokens.size());
      if (size >= spec_.positions) {
        throw ConfigError(
            format("sample: prompt {} has {} tokens, must have fewer than the model's {} positions",
                   prompt + 1, size, spec_.positions));
      }
      const bool outgrows = size + options_.tokens - 1 > spec_.positions;
      if (outgrows && !std::exchange(warned, true) && model_.world.rank() == 0) {
        log::warn(
            format("a prompt of {} tokens and --tokens {} are more than the model's {} positions: "
                   "from new "
                   "token {} on it sees the last {} to {} tokens only",
                   size, options_.tokens, spec_.positions, spec_.positions - size + 2,
                   spec_.positions / 2, spec_.positions));
      }
      for (int64_t sample = 0; sample < options_.samples; ++sample, ++index) {
        if (groups > 1 && index % groups != static_cast<size_t>(dp.rank())) continue;
        requests_.push_back(
            {.prompt = {tokens.begin(), tokens.end()}, .stream = static_cast<int64_t>(index)});
        outputs_.push_back(
            {.prompt = prompt, .sample = sample, .stream = TextStream(options_.stop)});
      }
    }
  }

  void say(std::string_view text) {
    if (speaks_) speaks_ = write_out(text);
  }
  void show(std::string_view text) {
    if (streams_) say(text);
  }

  // On all ranks alike, but for what is written.
  bool take(const model::NewToken& token) {
    Output& output = outputs_[token.request];
    if (!first_) first_ = seconds_since(started_);
    if (ends_.contains(token.token)) {
      output.finish = "stop";
      return false;
    }
    output.tokens.push_back(token.token);
    const auto id = static_cast<int32_t>(token.token);
    if (options_.logprobs >= 0) {
      Json top = Json::array();
      for (const model::Candidate& each : token.log.top)
        top.push_back({{"token_id", each.token}, {"logprob", each.probability}});
      output.logs.push_back(
          {{"token_id", token.token}, {"logprob", token.log.token}, {"top", std::move(top)}});
    }
    show(output.stream.push(tokenizer_.decode({&id, 1})));
    if (output.stream.has_stopped()) output.finish = "stop";
    // With other ranks waiting the text is generated to its end, even if the reader has gone.
    const bool is_read = speaks_ || !streams_ || model_.world.size() > 1;
    return is_read && !output.stream.has_stopped();
  }

  // All texts, in the order of the prompts, on rank 0.
  void say_all(double seconds) {
    Json mine = Json::array();
    for (const Output& output : outputs_) {
      Json record{{"prompt", output.prompt}, {"sample", output.sample}};
      record["text"] = output.stream.text();
      record["token_ids"] = output.tokens;
      record["finish"] = output.finish;
      if (options_.logprobs >= 0) record["logprobs"] = output.logs;
      mine.push_back(std::move(record));
    }
    mine.push_back({{"first", first_.value_or(0)}, {"seconds", seconds}});
    const auto texts = comm::gather_texts(mine.dump(-1, ' ', false, Json::error_handler_t::replace),
                                          model_.patient);
    if (!speaks_) return;
    std::vector<Json> records;
    std::set<std::pair<int64_t, int64_t>> seen;  // ranks of one model have the same
    double first = 0;
    for (const std::string& text : texts) {
      const Json parts = Json::parse(text);
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        if (seen.emplace(parts[i]["prompt"], parts[i]["sample"]).second)
          records.push_back(parts[i]);
      }
      first = std::max(first, parts.back()["first"].get<double>());
      seconds = std::max(seconds, parts.back()["seconds"].get<double>());
    }
    std::ranges::sort(records, {}, [](const Json& record) {
      return std::pair(record["prompt"].get<int64_t>(), record["sample"].get<int64_t>());
    });
    int64_t tokens = 0;
    for (const Json& record : records) {
      tokens += static_cast<int64_t>(record["token_ids"].size());
      if (options_.json) {
        say(line_of(record));
        continue;
      }
      say(format("== prompt {}, sample {} ==\n", record["prompt"].get<int64_t>() + 1,
                 record["sample"].get<int64_t>() + 1));
      say(prompts_[record["prompt"].get<size_t>()]);
      say(record["text"].get<std::string>());
      say("\n");
    }
    if (options_.json) {
      say(line_of({{"tokens", tokens},
                   {"tokens_per_s", static_cast<double>(tokens) / seconds},
                   {"ttft_ms", 1000 * first}}));
    }
  }

  const SampleOptions& options_;
  LoadedModel& model_;
  const config::ModelSpec& spec_;
  const data::Tokenizer& tokenizer_;
  const std::vector<std::string> prompts_;
  std::set<int64_t> ends_;
  std::vector<model::TextRequest> requests_;
  std::vector<Output> outputs_;
  Clock::time_point started_ = {};
  std::optional<double> first_;
  bool speaks_ = false, streams_ = false;
};

}  // namespace

int sample_rank(const std::vector<std::string>& arguments) {
  std::signal(SIGPIPE, SIG_IGN);
  SampleOptions options;
  if (const auto status = parse_sample(arguments, options)) return *status;
  const ModelSource source = open_model(options.model);
  const ModelTokenizer tokenizer = open_tokenizer(options.model, source);
  const std::string line = take_generation_config(options, tokenizer.files.generation_config);
  LoadedModel model = load_model(options.model, source);
  if (!line.empty() && model.world.rank() == 0) log::info("[sample] " + line);
  Sampler(options, model, source.config.model, tokenizer).run();
  return 0;
}

}  // namespace lockstep::cli

// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numbers>

#include "lockstep/cli/infer/eval_options.h"
#include "lockstep/cli/infer/infer_rank.h"
#include "lockstep/cli/infer/json_input.h"
#include "lockstep/cli/infer/loaded_model.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/config/input_files.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/train/evaluator.h"

namespace lockstep::cli {
namespace {

using Json = nlohmann::ordered_json;

// For people who wait.
void show_progress(double part) {
  if (isatty(STDERR_FILENO) == 0) return;
  constexpr int kWidth = 40;
  const int done = static_cast<int>(part * kWidth);
  std::cerr << format("\r[{}{}] {:3.0f} %", std::string(static_cast<size_t>(done), '='),
                      std::string(static_cast<size_t>(kWidth - done), ' '), 100 * part);
  if (part >= 1) std::cerr << "\n";
  std::cerr.flush();
}

// ---- text ----

// The validation data of the run, and how the trainer cuts it.
data::Corpus validation_of(const EvalOptions& options, const ModelSource& source,
                           const data::Tokenizer& tokenizer) {
  config::TrainConfig trained = source.trained;
  if (trained.data.pack && options.seq_len > 0) trained.train.seq_len = options.seq_len;
  trained.data.tokenizer = tokenizer.name();
  trained.train.eval_first = true;
  const config::Data data = config::open_data(trained);
  if (data.validation.size() < 2) {
    throw ConfigError(format("eval: the run of {} has no validation data; add --data.path",
                             options.model.checkpoint));
  }
  return data.validation;
}

train::EvaluatorOptions windows_of(const EvalOptions& options, const ModelSource& source,
                                   const data::Tokenizer& tokenizer, const data::Corpus& corpus,
                                   c10::Device device) {
  const auto& trained = source.trained.train;
  const int64_t positions = source.config.model.positions;
  train::EvaluatorOptions windows{.seq_len = options.seq_len,
                                  .rows = options.rows > 0 ? options.rows : trained.micro_batch,
                                  .vocab = source.config.model.vocab,
                                  .stride = options.stride,
                                  .device = device};
  if (windows.seq_len == 0)
    windows.seq_len = options.stride > 0 || !source.manifest ? positions : trained.seq_len;
  if (windows.seq_len > positions || windows.stride > windows.seq_len) {
    throw ConfigError(
        format("eval: --seq-len is {} and --stride {}, must be at most the model's {} positions, "
               "and a stride at most the length",
               windows.seq_len, windows.stride, positions));
  }
  if (options.data.empty()) windows.max_tokens = trained.eval_tokens;
  if (!corpus.has_token_ids()) {
    windows.bytes_of = [&tokenizer](std::span<const int64_t> targets) {
      std::vector<int32_t> ids(targets.begin(), targets.end());
      // It ends documents, and is in no text.
      if (const auto end = tokenizer.end_of_text()) std::erase(ids, static_cast<int32_t>(*end));
      return static_cast<int64_t>(tokenizer.decode(ids).size());
    };
  }
  return windows;
}

void evaluate_text(const EvalOptions& options, const ModelSource& source,
                   const data::Tokenizer& tokenizer, LoadedModel& model) {
  const data::Corpus corpus = options.data.empty() ? validation_of(options, source, tokenizer)
                                                   : data::Corpus::open(options.data, tokenizer);
  if (options.stride > 0 && corpus.has_examples())
    throw ConfigError(
        "eval: --stride is for a stream of text, not for packed documents or prompts with "
        "completions; leave it out");
  const train::Evaluator evaluator(corpus, model.model.mesh()["dp"],
                                   windows_of(options, source, tokenizer, corpus, model.device));
  if (evaluator.empty())
    throw ConfigError(format("eval: {} has fewer than 2 tokens", options.data));
  const bool speaks = model.world.rank() == 0;
  const train::Scores scores = evaluator.score(model.model, [&](double part) {
    if (speaks) show_progress(part);
  });
  if (!speaks) return;
  const double loss = scores.mean();
  Json result{{"loss", loss}, {"perplexity", std::exp(loss)}, {"bits_per_byte", nullptr}};
  if (scores.bytes > 0)
    result["bits_per_byte"] = scores.loss / (static_cast<double>(scores.bytes) * std::numbers::ln2);
  result["tokens"] = scores.tokens;
  if (options.json) {
    std::cout << result.dump() << "\n";
    return;
  }
  std::cout << format("loss {:.6f}, perplexity {:.4f}", loss, std::exp(loss));
  if (scores.bytes > 0)
    std::cout << format(", {:.4f} bits per byte", result["bits_per_byte"].get<double>());
  std::cout << format(", {} tokens\n", scores.tokens);
}

// ---- continuations ----

struct Continuation {
  std::string context, continuation;
};

std::vector<Continuation> read_requests(const std::string& file) {
  std::vector<Continuation> requests;
  for_each_json_line(
      read_input(file), file, [&](const io::OrderedJson& json, const std::string& place) {
        const auto member = [&](const char* key) {
          if (!json.is_object() || !json.contains(key) || !json[key].is_string())
            throw ConfigError(format(
                "{}: must be an object with the texts \"context\" and \"continuation\"", place));
          return json[key].get<std::string>();
        };
        requests.push_back({member("context"), member("continuation")});
        if (requests.back().continuation.empty())
          throw ConfigError(format("{}: \"continuation\" is empty, must have a character", place));
      });
  if (requests.empty()) throw ConfigError(format("eval: --requests {} has no request", file));
  return requests;
}

// As lm-evaluation-harness cuts it: spaces at the end of the context belong to the continuation.
model::ScoredText text_of(Continuation request, const data::Tokenizer& tokenizer,
                          int64_t positions) {
  const size_t last = request.context.find_last_not_of(" \t\n\r\v\f");
  const size_t kept = last == std::string::npos ? 0 : last + 1;
  request.continuation.insert(0, request.context.substr(kept));
  request.context.resize(kept);
  const auto whole = tokenizer.encode(request.context + request.continuation);
  model::ScoredText text{.tokens = {whole.begin(), whole.end()},
                         .from = static_cast<int64_t>(tokenizer.encode(request.context).size())};
  // A token that has the end of the context and the beginning of the continuation is scored.
  text.from = std::min(text.from, static_cast<int64_t>(whole.size()) - 1);
  if (text.from == 0) {
    const auto prefix = tokenizer.end_of_text();
    if (!prefix) {
      throw ConfigError(
          format("eval: a context is empty, and the tokenizer {} has no end-of-text token to begin "
                 "with",
                 tokenizer.name()));
    }
    text.tokens.insert(text.tokens.begin(), *prefix);
    text.from = 1;
  }
  // What does not fit is cut from the left.
  const int64_t excess = static_cast<int64_t>(text.tokens.size()) - 1 - positions;
  if (excess > 0) {
    text.tokens.erase(text.tokens.begin(), text.tokens.begin() + excess);
    text.from = std::max<int64_t>(text.from - excess, 1);
  }
  return text;
}

void score_requests(const EvalOptions& options, const ModelSource& source,
                    const data::Tokenizer& tokenizer, LoadedModel& model) {
  const auto shared = comm::run_on_all_ranks("requests", model.world, [&]() -> std::string {
    if (model.world.rank() != 0) return {};
    Json all = Json::array();
    for (const Continuation& each : read_requests(options.requests))
      all.push_back({each.context, each.continuation});
    return all.dump(-1, ' ', false, Json::error_handler_t::replace);
  });
  std::vector<model::ScoredText> texts;
  for (const Json& each : Json::parse(shared[0]))
    texts.push_back(text_of({each[0], each[1]}, tokenizer, source.config.model.positions));
  const comm::Group dp = model.model.mesh()["dp"];
  const bool splits = model.splits && dp.size() > 1;
  const bool speaks = model.world.rank() == 0;
  Json mine = Json::array();
  constexpr size_t kAtOnce = 16;
  for (size_t begin = 0; begin < texts.size(); begin += kAtOnce) {
    std::vector<model::ScoredText> some;
    std::vector<size_t> places;
    for (size_t i = begin; i < std::min(texts.size(), begin + kAtOnce); ++i) {
      if (splits && i % static_cast<size_t>(dp.size()) != static_cast<size_t>(dp.rank())) continue;
      some.push_back(texts[i]);
      places.push_back(i);
    }
    if (some.empty()) continue;
    const auto scores = model.text->score(some);
    for (size_t i = 0; i < some.size(); ++i)
      mine.push_back({places[i], scores[i].log_likelihood, scores[i].is_greedy});
    if (speaks)
      show_progress(static_cast<double>(std::min(texts.size(), begin + kAtOnce)) /
                    static_cast<double>(texts.size()));
  }
  const auto all = comm::gather_texts(mine.dump(), model.patient);
  if (!speaks) return;
  std::vector<Json> lines(texts.size());
  for (const std::string& part : all) {
    for (const Json& each : Json::parse(part)) {
      const auto place = each[0].get<size_t>();
      lines[place] = {
          {"loglikelihood", each[1]},
          {"is_greedy", each[2]},
          {"tokens", static_cast<int64_t>(texts[place].tokens.size()) - texts[place].from}};
    }
  }
  for (const Json& line : lines) std::cout << line.dump() << "\n";
}

}  // namespace

int eval_rank(const std::vector<std::string>& arguments) {
  EvalOptions options;
  if (const auto status = parse_eval(arguments, options)) return *status;
  const ModelSource source = open_model(options.model);
  const ModelTokenizer tokenizer = open_tokenizer(options.model, source);
  LoadedModel model = load_model(options.model, source);
  if (options.requests.empty()) {
    evaluate_text(options, source, tokenizer.tokenizer, model);
  } else {
    score_requests(options, source, tokenizer.tokenizer, model);
  }
  return 0;
}

}  // namespace lockstep::cli

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/sample_options.h"

#include <algorithm>

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/infer/json_input.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/json.h"

namespace lockstep::cli {
namespace {

CLI::Validator fraction(bool above_0) {
  return CLI::Validator(
      [above_0](std::string& text) {
        double value = 0;
        const bool read = CLI::detail::lexical_cast(text, value);
        return read && value <= 1 && (above_0 ? value > 0 : value >= 0)
                   ? std::string()
                   : format("is {}, must be {} 0 and at most 1", text,
                            above_0 ? "above" : "at least");
      },
      "FRACTION");
}

}  // namespace

std::optional<int> parse_sample(const std::vector<std::string>& arguments, SampleOptions& options) {
  CLI::App app;
  add_model_options(app, options.model);
  app.add_option("--prompt", options.prompts, "Text to continue; may be given several times")
      ->expected(1)
      ->take_all();
  app.add_option("--prompt-file", options.prompt_file,
                 "File with a text to continue, or with JSON lines {\"prompt\": TEXT}; - means "
                 "standard input");
  app.add_option("--tokens", options.tokens, "Number of tokens to generate")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--temperature", options.temperature,
                 "Sampling temperature; values below 1 prefer likely tokens, 0 always takes the "
                 "most likely token")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--top-k", options.top_k,
                 "Sample from the k most likely tokens; 0 samples from all")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--top-p", options.top_p,
                 "Then from the fewest tokens whose probabilities sum to this")
      ->check(fraction(true))
      ->capture_default_str();
  app.add_option("--min-p", options.min_p,
                 "Then from tokens with at least this fraction of the largest probability")
      ->check(fraction(false))
      ->capture_default_str();
  app.add_option("--repetition-penalty", options.repetition_penalty,
                 "Above 1, tokens that the text has already are less likely")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Random seed")->capture_default_str();
  app.add_option("--samples", options.samples, "Texts for each prompt")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--stop", options.stop,
                 "Text that ends the generation and is not printed; may be given several times")
      ->expected(1)
      ->take_all();
  app.add_option("--logprobs", options.logprobs,
                 "With --json: log-probabilities of each token, and of the N most likely ones")
      ->check(whole_number(0, 1000));
  app.add_option("--rows", options.rows, "Texts that are generated at a time")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  app.add_flag("--ignore-eos", options.ignore_eos, "Continue after an end-of-text token");
  app.add_flag("--json", options.json,
               "Print a JSON object for each text, and one with tokens/s at the end");
  const auto rest = take_layout(arguments, "sample", options.model);
  if (const auto status = parse(app, "sample",
                                format("Generates text with a trained model.\n"
                                       "Usage: lockstep sample --checkpoint DIR --prompt TEXT "
                                       "[-n N] [OPTIONS]\n"
                                       "Options of the layout:\n{}",
                                       kLayoutHelp),
                                rest)) {
    return status;
  }
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() > 0) options.given.push_back(option->get_name());
  }
  if (options.prompts.empty() && options.prompt_file.empty()) options.prompts.emplace_back("\n");
  if (std::ranges::count(options.prompts, "") > 0)
    throw ConfigError("sample: --prompt is empty, must have a character");
  if (std::ranges::count(options.stop, "") > 0)
    throw ConfigError("sample: --stop is empty, must have a character");
  if (options.logprobs >= 0 && !options.json)
    throw ConfigError("sample: --logprobs is for JSON output; add --json");
  require_file("sample: --prompt-file", options.prompt_file);
  find_model(options.model);
  return std::nullopt;
}

std::vector<std::string> read_prompts(const SampleOptions& options) {
  std::vector<std::string> prompts = options.prompts;
  if (options.prompt_file.empty()) return prompts;
  const std::string& file = options.prompt_file;
  const std::string text = read_input(file);
  if (text.empty()) throw ConfigError(format("sample: --prompt-file {} is empty", file));
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos || text[first] != '{') {
    prompts.push_back(text);
    return prompts;
  }
  for_each_json_line(text, file, [&](const io::OrderedJson& json, const std::string& place) {
    if (!json.is_object() || !json.contains("prompt") || !json["prompt"].is_string() ||
        json["prompt"].get<std::string>().empty())
      throw ConfigError(format("{}: must be an object with a text \"prompt\"", place));
    prompts.push_back(json["prompt"].get<std::string>());
  });
  return prompts;
}

std::string take_generation_config(SampleOptions& options, const std::string& file) {
  if (file.empty()) return {};
  const auto json = io::parse_user_json(read_text(file, io::kMaxJsonBytes), file);
  std::vector<std::string> taken, left;
  const auto is_given = [&](const char* flag) {
    return std::ranges::find(options.given, flag) != options.given.end();
  };
  const auto number = [&](const char* key) -> std::optional<double> {
    if (!json.contains(key) || json[key].is_null()) return std::nullopt;
    if (!json[key].is_number())
      throw ConfigError(format("{}: {} is {}, must be a number", file, key, json[key].dump()));
    return json[key].get<double>();
  };
  const auto take = [&](const char* key, const char* flag, auto& variable) {
    const auto value = number(key);
    if (!value || is_given(flag)) return;
    using Type = std::remove_reference_t<decltype(variable)>;
    if (variable == static_cast<Type>(*value)) return;
    variable = static_cast<Type>(*value);
    taken.push_back(format("{} {}", key, *value));
  };
  take("temperature", "--temperature", options.temperature);
  take("top_k", "--top-k", options.top_k);
  take("top_p", "--top-p", options.top_p);
  take("min_p", "--min-p", options.min_p);
  take("repetition_penalty", "--repetition-penalty", options.repetition_penalty);
  take("max_new_tokens", "--tokens", options.tokens);
  if (json.contains("do_sample") && json["do_sample"] == false && !is_given("--temperature")) {
    options.temperature = 0;
    taken.emplace_back("do_sample false");
  }
  // What would change the text, and is not done.
  for (const auto& [key, neutral] :
       std::initializer_list<std::pair<const char*, double>>{{"num_beams", 1},
                                                             {"typical_p", 1},
                                                             {"epsilon_cutoff", 0},
                                                             {"eta_cutoff", 0},
                                                             {"no_repeat_ngram_size", 0},
                                                             {"min_new_tokens", 0},
                                                             {"encoder_repetition_penalty", 1}}) {
    if (const auto value = number(key); value && *value != neutral)
      left.push_back(format("{} {}", key, *value));
  }
  std::string line;
  if (!taken.empty()) line = format("generation_config.json sets {}", join(taken));
  if (!left.empty())
    line += format("{}{} of it {} no effect", line.empty() ? "generation_config.json: " : "; ",
                   join(left), left.size() == 1 ? "has" : "have");
  return line;
}

}  // namespace lockstep::cli

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/eval_options.h"

#include "lockstep/cli/common/options.h"
#include "lockstep/cli/infer/json_input.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {

std::optional<int> parse_eval(const std::vector<std::string>& arguments, EvalOptions& options) {
  CLI::App app;
  add_model_options(app, options.model);
  app.add_option("--data.path", options.data,
                 "Text file, folder of text files, token file (.bin) or JSON lines (.jsonl) "
                 "(default: the validation data of the training run)");
  app.add_option("--requests", options.requests,
                 "JSON lines {\"context\": TEXT, \"continuation\": TEXT}, each answered by its "
                 "log-likelihood; - means standard input");
  app.add_option("--seq-len", options.seq_len,
                 "Length of the windows in tokens (default: with --stride the model's positions, "
                 "else as in training)")
      ->check(whole_number(2, int64_t{1} << 40));
  app.add_option("--stride", options.stride,
                 "Windows begin so many tokens apart, and each scores only the tokens that the one "
                 "before has not (default: windows do not overlap)")
      ->check(whole_number(1, int64_t{1} << 40));
  app.add_option("--rows", options.rows, "Windows that are computed at a time")
      ->check(whole_number(1, 1 << 20));
  app.add_flag("--json", options.json, "Print the result as JSON");
  const auto rest = take_layout(arguments, "eval", options.model);
  if (const auto status = parse(
          app, "eval",
          format("Measures a trained model: loss, perplexity and bits per byte of text, or "
                 "log-likelihoods of continuations.\n"
                 "Usage: lockstep eval --checkpoint DIR [--data.path FILE [--stride N]] [-n N] "
                 "[OPTIONS]\n"
                 "       lockstep eval --checkpoint DIR --requests FILE.jsonl [-n N] "
                 "[OPTIONS]\n"
                 "Options of the layout:\n{}",
                 kLayoutHelp),
          rest)) {
    return status;
  }
  if (!options.data.empty() && !options.requests.empty())
    throw ConfigError("eval: --data.path and --requests are two measurements; give one of them");
  if (options.stride > 0 && options.data.empty())
    throw ConfigError("eval: --stride is for --data.path; add it");
  if (!options.requests.empty() && (options.seq_len > 0 || options.rows > 0))
    throw ConfigError(
        "eval: --seq-len and --rows are for windows of text, not for --requests; leave them out");
  require_file("eval: --requests", options.requests);
  find_model(options.model);
  if (options.model.is_hugging_face && options.data.empty() && options.requests.empty())
    throw ConfigError(format("eval: {} has no validation data of a run; add --data.path",
                             options.model.checkpoint));
  return std::nullopt;
}

}  // namespace lockstep::cli

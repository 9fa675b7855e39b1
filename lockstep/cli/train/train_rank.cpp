// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/train_rank.h"

#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/cli/train/sample_options.h"
#include "lockstep/cli/train/train.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/trace.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/model/language_model.h"
#include "lockstep/parallel/data/ddp.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {
namespace {

constexpr int kStopped = 75;  // EX_TEMPFAIL: saved, start me again

bool write_out(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Puts files where rank 0 has decided, and its log into the run folder. Its failure is every
// rank's.
void use_run_folder(config::TrainConfig& config, const comm::Group& group) {
  const auto settings = comm::run_on_all_ranks("run.dir", group, [&]() -> std::string {
    if (group.rank() != 0) return {};
    if (const char* const failure = std::getenv(kFailure)) throw ConfigError(failure);
    const char* const text = std::getenv(kSettings);
    if (text == nullptr) throw ConfigError("train: ranks are started by lockstep train");
    config::adopt(config, text);
    log::copy_to(config.run.dir.empty() ? "" : config.run.dir + "/log.txt");
    return text;
  });
  if (group.rank() == 0) return;
  config::adopt(config, settings[0]);
  log::copy_to("");
}

// Text that the model does not see has no effect on what it generates.
void warn_of_length(int64_t prompt, int64_t tokens, int64_t positions) {
  if (prompt > positions) {
    log::warn(
        format("the prompt has {} tokens, but the model has {} positions: it sees the last {}",
               prompt, positions, positions));
  } else if (prompt + tokens - 1 > positions) {
    log::warn(
        format("a prompt of {} tokens and --tokens {} are more than the model's {} positions: from "
               "new token {} on it sees the last {} only",
               prompt, tokens, positions, positions - prompt + 2, positions));
  }
}

data::Tokenizer tokenizer_for(const SampleOptions& options, const formats::Manifest& manifest) {
  if (options.tokenizer.empty()) {
    const auto saved = config::saved_tokenizer(manifest, options.checkpoint);
    return data::Tokenizer::open(saved.name, saved.model_folder);
  }
  auto tokenizer = data::Tokenizer::open(options.tokenizer);
  config::warn_of_other_tokenizer(manifest, options.checkpoint, options.tokenizer);
  return tokenizer;
}

}  // namespace

int train_rank(const std::vector<std::string>& arguments) {
  std::signal(SIGPIPE, SIG_IGN);  // training continues without a reader
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with its name
  log::hold_lines();
  config::TrainConfig config = config::parse_train_arguments(arguments).config;
  if (config.metrics.trace == "auto") trace::expect_folder();
  const comm::Group group = comm::init({.backend = config.comm.backend,
                                        .strategy = config.comm.strategy,
                                        .timeout = config.timeout()});
  comm::require_same(config::common_lines(config), group);
  use_run_folder(config, group);
  config.validate(group.size());
  if (!config.metrics.trace.empty()) trace::write_to(config.metrics.trace);
  try {
    train::Trainer trainer(config, group);
    return trainer.run() == train::TrainingResult::stopped ? kStopped : 0;
  } catch (const std::exception& failure) {
    log::copy_line(std::string("lockstep: ") + failure.what());
    throw;
  }
}

int sample_rank(const std::vector<std::string>& arguments) {
  SampleOptions options;
  if (const auto status = parse_sample(arguments, options)) return *status;
  const auto manifest = formats::read_manifest(options.checkpoint);
  const auto config = config::train_config_from_json(manifest.config, options.checkpoint);
  const data::Tokenizer tokenizer = tokenizer_for(options, manifest);
  model::LanguageModel model(
      config.model, {.tensors = at::TensorOptions().device(parallel::detected_device({}))});
  checkpoint::load(options.checkpoint, checkpoint::slices_of(*model), {},
                   {.may_ignore = {"optim."}});

  const auto prompt = tokenizer.encode(options.prompt);
  warn_of_length(static_cast<int64_t>(prompt.size()), options.tokens, config.model.positions);
  write_out(options.prompt);
  model::generate(*model, {prompt.begin(), prompt.end()},
                  {.tokens = options.tokens,
                   .temperature = options.temperature,
                   .top_k = options.top_k,
                   .seed = static_cast<uint64_t>(options.seed),
                   .vocab = tokenizer.vocab_size()},
                  [&](int64_t token) {
                    const auto id = static_cast<int32_t>(token);
                    if (tokenizer.end_of_text() == id) return false;
                    return write_out(tokenizer.decode({&id, 1}));
                  });
  write_out("\n");
  return 0;
}

}  // namespace lockstep::cli

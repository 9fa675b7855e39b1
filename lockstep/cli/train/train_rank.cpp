// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/train/train_rank.h"

#include <unistd.h>

#include <csignal>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/cli/train/sample_options.h"
#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/comm/group.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
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

}  // namespace

int train_rank(const std::vector<std::string>& arguments) {
  std::signal(SIGPIPE, SIG_IGN);  // training continues without a reader
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error with its name
  const config::TrainConfig config = config::parse_train_arguments(arguments).config;
  const comm::Group group = comm::init({.backend = config.comm.backend,
                                        .strategy = config.comm.strategy,
                                        .timeout = config.timeout()});
  comm::require_same(config::common_lines(config), group);
  config.validate(group.size());
  train::Trainer trainer(config, group);
  return trainer.run() == train::TrainingResult::stopped ? kStopped : 0;
}

int sample_rank(const std::vector<std::string>& arguments) {
  SampleOptions options;
  if (const auto status = parse_sample(arguments, options)) return *status;
  const auto manifest = formats::read_manifest(options.checkpoint);
  const auto config = config::train_config_from_json(manifest.config, options.checkpoint);
  const auto tokenizer =
      data::Tokenizer::open(options.tokenizer.empty() ? config.data.tokenizer : options.tokenizer);
  model::LanguageModel model(
      config.model, {.tensors = at::TensorOptions().device(parallel::detected_device({}))});
  checkpoint::load(options.checkpoint, checkpoint::slices_of(*model), {},
                   {.may_ignore = {"optim."}});

  const auto prompt = tokenizer.encode(options.prompt);
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

// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/group.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/log.h"
#include "lockstep/train/trainer.h"
#include "tests/train/train_command.h"

namespace lockstep::test {

void train_in_threads(const Words& arguments) {
  const auto parsed = config::parse_train_arguments(arguments);
  config::TrainConfig config = parsed.config;
  const int ranks = parsed.ranks.value_or(1);
  config::RunFolder folder(parsed, {});
  config::adopt(config, folder.open(config::check_inputs(folder.config(), ranks)));
  comm::run_threads(ranks,
                    [&](const comm::Group& group) {
                      config.validate(group.size());
                      train::Trainer trainer(config, group);
                      EXPECT_EQ(trainer.run(), train::TrainingResult::finished);
                    },
                    {.backend = config.comm.backend == "auto" ? "thread" : config.comm.backend,
                     .strategy = config.comm.strategy,
                     .timeout = config.timeout()});
  log::copy_to("");
}

}  // namespace lockstep::test

// SPDX-License-Identifier: Apache-2.0
// Generates greedy text from a language model with random weights, in the layout of the options of
// `lockstep train`, and prints one line of JSON: the time to the first tokens of all texts, tokens
// per second after them, and what the weights take.
//
//   bench_decode TEXTS PROMPT TOKENS [--model.kind llama --model.layers 16 ...]
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/config/train_arguments.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/model/text_model.h"
#include "lockstep/train/device/device.h"
#include "lockstep/train/device/threads.h"
#include "lockstep/train/trained_model.h"

namespace lockstep {
namespace {

struct Times {
  double first = 0;  // until the first new token of the last text
  double rest = 0;   // after it
};

Times generate(model::TextModel& model, const config::ModelSpec& spec, int64_t count,
               int64_t prompt, int64_t tokens) {
  std::vector<model::TextRequest> requests;
  for (int64_t i = 0; i < count; ++i) {
    model::TextRequest request{.stream = i};
    for (int64_t j = 0; j < prompt; ++j) request.prompt.push_back((i * 31 + j * 7) % spec.vocab);
    requests.push_back(std::move(request));
  }
  Times times;
  const auto begun = Clock::now();
  model::generate_texts(model, requests,
                        {.generate = {.tokens = tokens, .temperature = 0},
                         .positions = spec.positions,
                         .rows = count,
                         .top = -1},
                        [&](const model::NewToken& token) {
                          if (token.index == 0) times.first = seconds_since(begun);
                          return true;
                        });
  times.rest = seconds_since(begun) - times.first;
  return times;
}

int run(const std::vector<std::string>& words) {
  if (words.size() < 3) throw ConfigError("usage: bench_decode TEXTS PROMPT TOKENS [OPTIONS]");
  const int64_t count = std::atoll(words[0].c_str()), prompt = std::atoll(words[1].c_str()),
                tokens = std::atoll(words[2].c_str());
  config::TrainConfig config =
      config::parse_train_arguments({words.begin() + 3, words.end()}).config;
  config.model = config.model.resolved(config.train.seq_len, config.model.vocab);
  const comm::Group world = comm::init({.backend = config.comm.backend});
  train::set_threads(config, world);
  const c10::Device device = train::choose_device(config, world);
  const auto decoding = std::make_shared<model::Decoding>();
  const train::TrainedModel model(config, device, world, decoding);
  const auto text = model::text_model(model.pipeline(), decoding, config.model);
  generate(*text, config.model, count, prompt, 4);  // what the first forward prepares
  const Times times = generate(*text, config.model, count, prompt, tokens);
  const double bytes = static_cast<double>(config.model.parameters()) *
                       (config.train.dtype == config::Precision::float32 ? 4 : 2);
  if (world.rank() == 0) {
    std::printf(
        "{\"texts\": %ld, \"prompt\": %ld, \"tokens\": %ld, \"first_ms\": %.2f, "
        "\"tokens_per_s\": %.1f, \"steps_per_s\": %.2f, \"weights_gb\": %.3f}\n",
        count, prompt, tokens, 1e3 * times.first,
        static_cast<double>(count * (tokens - 1)) / times.rest,
        static_cast<double>(tokens - 1) / times.rest, bytes / 1e9);
  }
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  try {
    return lockstep::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

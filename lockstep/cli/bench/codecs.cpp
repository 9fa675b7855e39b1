// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/bench/codecs.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "lockstep/cli/common/options.h"
#include "lockstep/codec/codec.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using codec::Codec;
using codec::Sign;
using Json = nlohmann::ordered_json;

struct Sample {
  const char* name;
  Sign sign;
  std::vector<float> values;
};

// Repeats what is there: drawing numbers takes longer than all that is measured.
void lengthen(std::vector<float>& values, size_t count) {
  const size_t drawn = values.size();
  values.resize(count);
  for (size_t i = drawn; i < count; ++i) values[i] = values[i - drawn];
}

// Weights, and the moments after 40 steps of Adam on gradients whose sizes differ from weight to
// weight, as those of a model do.
std::vector<Sample> make_samples(size_t count) {
  constexpr int kSteps = 40;
  constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f;
  const size_t drawn = std::min(count, size_t{1} << 18);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> weights(drawn), means(drawn), squares(drawn);
  for (size_t i = 0; i < drawn; ++i) {
    weights[i] = 0.02f * normal(random);
    const float size = 1e-3f * std::exp(normal(random));
    for (int step = 0; step < kSteps; ++step) {
      const float grad = size * normal(random);
      means[i] = means[i] * kBeta1 + (1 - kBeta1) * grad;
      squares[i] = squares[i] * kBeta2 + (1 - kBeta2) * grad * grad;
    }
  }
  std::vector<Sample> samples{{"weights", Sign::any, std::move(weights)},
                              {"exp_avg", Sign::any, std::move(means)},
                              {"exp_avg_sq", Sign::non_negative, std::move(squares)}};
  for (Sample& sample : samples) lengthen(sample.values, count);
  return samples;
}

// The fastest of a few runs, after one that warms up.
template <class Body>
double seconds_of(const Body& body) {
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    const auto start = Clock::now();
    body();
    const double seconds = seconds_since(start);
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;
  }
  return best;
}

struct CodecRun {
  std::vector<float> kept;
  size_t bytes = 0;
  double encode = 0, decode = 0;  // seconds
};

CodecRun run_codec(Codec codec, const Sample& sample) {
  const std::vector<float>& values = sample.values;
  CodecRun run{.kept = std::vector<float>(values.size())};
  std::vector<std::byte> encoded;
  if (codec == Codec::lossless) {
    run.encode =
        seconds_of([&] { encoded = codec::compress(std::as_bytes(std::span(values)), 4); });
    run.decode = seconds_of(
        [&] { codec::decompress(encoded, std::as_writable_bytes(std::span(run.kept))); });
  } else {
    const auto count = static_cast<int64_t>(values.size());
    const codec::ElementRange all{count, 0, count};
    encoded.resize(codec::encoded_size(codec, count));
    run.encode =
        seconds_of([&] { codec::encode(codec, sample.sign, values.data(), encoded.data(), all); });
    run.decode = seconds_of(
        [&] { codec::decode(codec, sample.sign, encoded.data(), run.kept.data(), all); });
  }
  run.bytes = encoded.size();
  return run;
}

Json measure(Codec codec, const Sample& sample) {
  const CodecRun result = run_codec(codec, sample);
  double largest = 0, errors = 0, squares = 0;
  for (size_t i = 0; i < sample.values.size(); ++i) {
    const double value = sample.values[i], error = std::fabs(result.kept[i] - value);
    if (value != 0) largest = std::max(largest, error / std::fabs(value));
    errors += error * error;
    squares += value * value;
  }
  const double bytes = static_cast<double>(sample.values.size()) * sizeof(float);
  return {{"codec", codec::name_of(codec)},
          {"values", sample.name},
          {"ratio", static_cast<double>(result.bytes) / bytes},
          {"encode_gbs", bytes / result.encode / 1e9},
          {"decode_gbs", bytes / result.decode / 1e9},
          {"max_error", largest},
          {"rms_error", squares > 0 ? std::sqrt(errors / squares) : 0},
          {"lossy", codec::is_lossy(codec)}};
}

void print_codecs(const Json& rows) {
  std::cout << format("{:<13} {:<11} {:>6} {:>12} {:>12} {:>10} {:>10}  {}\n", "codec", "values",
                      "ratio", "encode GB/s", "decode GB/s", "max error", "rms error", "lossy");
  for (const auto& row : rows) {
    std::cout << format("{:<13} {:<11} {:>6.3f} {:>12.2f} {:>12.2f} {:>10.2g} {:>10.2g}  {}\n",
                        row["codec"].get<std::string>(), row["values"].get<std::string>(),
                        row["ratio"].get<double>(), row["encode_gbs"].get<double>(),
                        row["decode_gbs"].get<double>(), row["max_error"].get<double>(),
                        row["rms_error"].get<double>(), row["lossy"].get<bool>() ? "yes" : "no");
  }
}

}  // namespace

int bench_codecs(const std::vector<std::string>& arguments) {
  int64_t elements = int64_t{1} << 24;
  bool json = false;
  CLI::App app;
  app.add_option("--elements", elements, "Float32 values per kind of state")
      ->check(whole_number(int64_t{1}, int64_t{1} << 32))
      ->capture_default_str();
  app.add_flag("--json", json, "Print one JSON array");
  const std::string usage =
      "Measures the codecs for optimizer state, on one thread and on synthetic weights and "
      "moments: "
      "kept\n"
      "bytes / float32 bytes, float32 bytes a second, the largest error of a value relative to it\n"
      "(1: it became zero), and the rms of the errors relative to that of the values.\n"
      "Usage: lockstep bench codecs [OPTIONS]\n";
  if (const auto status = parse(app, "bench codecs", usage, arguments)) return *status;

  Json rows = Json::array();
  const auto samples = make_samples(static_cast<size_t>(elements));
  for (const Codec codec :
       {Codec::none, Codec::fp16, Codec::bf16, Codec::int8, Codec::quantization, Codec::lossless}) {
    for (const Sample& sample : samples) rows.push_back(measure(codec, sample));
  }
  if (json) {
    std::cout << rows.dump(2) << "\n";
  } else {
    print_codecs(rows);
  }
  return 0;
}

}  // namespace lockstep::cli

// SPDX-License-Identifier: Apache-2.0
// `lockstep checkpoint export` and `lockstep checkpoint import`.
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/cli/checkpoint/verbs.h"
#include "lockstep/cli/common/options.h"
#include "lockstep/config/hf/hf_export.h"
#include "lockstep/config/hf/hf_import.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/schema/option_value.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/data/tokenizer/tokenizer.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

DType parse_type(const std::string& name) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    if (name_of(dtype) == name) return dtype;
  }
  throw ConfigError(
      format("checkpoint: --dtype is '{}', must be float32, bfloat16 or float16", name));
}

void require_name(const char* command, const char* what, const std::string& folder) {
  if (folder.empty())
    throw ConfigError(format("checkpoint {}: {} is empty, must name a folder", command, what));
}

void warn_of_overflow(const char* command, int64_t count, DType dtype) {
  if (count == 0) return;
  std::cerr << format("checkpoint {}: {} too large for {} became infinite\n", command,
                      counted(count, "value"), name_of(dtype));
}

}  // namespace

int checkpoint_export(const Words& arguments) {
  std::string dir, out, type, size = "5GB";
  config::HfExportOptions options;
  CLI::App app;
  app.add_option("DIR", dir)->required();
  app.add_option("OUT", out)->required();
  app.add_option("--dtype", type,
                 "Type of the exported weights: float32, bfloat16 or float16, rounded to nearest "
                 "even (default: as saved)");
  app.add_option(
         "--max-shard-size", size,
         "Split larger weights into several files of at most this size; units are powers of 1024")
      ->capture_default_str();
  app.add_flag("--force", options.replace, "Replace an existing model folder");
  if (const auto status = parse(
          app, "checkpoint export",
          "Exports the model of a checkpoint as a Hugging Face folder that transformers can load.\n"
          "Usage: lockstep checkpoint export DIR OUT [OPTIONS]\n"
          "DIR is a checkpoint of lockstep train, or a run folder or folder of checkpoints, which "
          "means the newest.\n"
          "OUT is created only when the export is complete.\n",
          arguments))
    return *status;
  require_name("export", "OUT", out);
  if (!type.empty()) options.dtype = parse_type(type);
  const auto bytes = config::parse_bytes(size);
  if (!bytes || *bytes < 1) {
    throw ConfigError(format(
        "checkpoint export: --max-shard-size is '{}', must be a size such as 5GB or 500MB", size));
  }
  options.max_file_bytes = *bytes;
  const auto start = Clock::now();
  const std::string from = config::checkpoint_at(dir);
  if (const std::string choice = config::describe_choice(dir, from); !choice.empty())
    std::cout << "checkpoint: " << choice << std::endl;
  const config::HfExported done = config::export_hf(from, out, options);
  warn_of_overflow("export", done.overflowed, done.dtype);
  std::cout << format("{}: {}, {}, {}, {} of weights in {}, {:.2f} seconds\n", out,
                      done.model.describe(), name_of(done.dtype), counted(done.tensors, "tensor"),
                      size_text(done.bytes), counted(done.files, "file"), seconds_since(start));
  if (!done.tokenizer.empty()) {
    std::cout << format("tokenizer: {}\n", done.tokenizer);
  } else {
    std::cerr << format(
        "checkpoint export: {} has no tokenizer.json: the model was trained with {}; programs that "
        "load the folder must bring that tokenizer\n",
        out, done.trained_with == "bytes" ? "bytes as tokens" : done.trained_with + ", not found");
  }
  return 0;
}

int checkpoint_import(const Words& arguments) {
  std::string folder, dir, type = "float32";
  CLI::App app;
  app.add_option("HF_DIR", folder)->required();
  app.add_option("DIR", dir)->required();
  app.add_option("--dtype", type, "float32, bfloat16 or float16, rounded to nearest even")
      ->capture_default_str();
  if (const auto status = parse(
          app, "checkpoint import",
          "Converts a Hugging Face folder (GPT-2 or Llama, safetensors) to a checkpoint at step "
          "0,\n"
          "DIR/step-00000000, with a configuration for lockstep train.\n"
          "Usage: lockstep checkpoint import HF_DIR DIR [--dtype TYPE]\n"
          "The checkpoint refers to HF_DIR/tokenizer.json by its path and does not copy it.\n",
          arguments))
    return *status;
  require_name("import", "DIR", dir);
  const config::HfImportOptions options{.dtype = parse_type(type)};
  const auto start = Clock::now();
  const config::HfImported done = config::import_hf(folder, dir, options);
  warn_of_overflow("import", done.overflowed, options.dtype);
  const std::string& tokenizer = done.config.data.tokenizer;
  try {
    data::Tokenizer::open(tokenizer);
  } catch (const ConfigError& failure) {
    std::cerr << format("checkpoint import: text will need another tokenizer: {}\n",
                        failure.what());
  }
  std::cout << format("{}: {}, {}, {}, {:.2f} seconds\ntokenizer: {}\n", done.path,
                      done.config.model.describe(), name_of(options.dtype),
                      counted(done.tensors, "tensor"), seconds_since(start), tokenizer);
  return 0;
}

}  // namespace lockstep::cli

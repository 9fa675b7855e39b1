// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/data.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <span>
#include <string_view>

#include "lockstep/cli/common/options.h"
#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/data/json_lines.h"
#include "lockstep/data/text_files.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/data/tokens/token_file.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;
namespace fs = std::filesystem;

// A document for each record.
void pack_records(const std::string& path, data::JsonLines& records,
                  const std::function<void(std::span<const int32_t>)>& write,
                  const data::Tokenizer& tokenizer) {
  records.read(path, [&](const data::Record& record) {
    if (records.has_examples()) {
      throw ConfigError(
          format("data pack: {} has a prompt with a completion, and a token file cannot say which "
                 "tokens count; train on the .jsonl itself",
                 record.where));
    }
    if (!record.text.empty()) write(tokenizer.encode(record.text));
  });
}

// One file, one document.
void pack_file(const std::string& path, const data::Tokenizer& tokenizer,
               data::TokenFileWriter& writer) {
  const InputFile file(path);
  // Bytes may be cut anywhere; where other tokenizers may be cut only they know.
  const uint64_t most = tokenizer.name() == "bytes" ? uint64_t{1} << 20 : file.size();
  std::string text;
  for (uint64_t begin = 0; begin < file.size(); begin += most) {
    text.resize(std::min(most, file.size() - begin));
    file.read(begin, std::as_writable_bytes(std::span(text)));
    writer.write(tokenizer.encode(text));
  }
}

void check_output(const std::string& output, data::TokenLayout layout, bool force) {
  Words written{output};
  if (layout == data::TokenLayout::megatron) written.push_back(data::index_path(output));
  for (const std::string& path : written) {
    if (!force && fs::exists(path)) {
      throw ConfigError(format("data pack: {} exists; --force replaces it", path));
    }
  }
}

int pack(const Words& arguments) {
  std::string input, output, tokenizer_name = "bytes", layout_name = "llm.c";
  bool append_end = false, force = false;
  CLI::App app;
  app.add_option("--input", input,
                 "Text to convert: a file, a folder or a pattern; separate several with commas")
      ->required();
  app.add_option("--output", output, "Output file; its name must end in .bin")->required();
  app.add_option("--tokenizer", tokenizer_name,
                 "Tokenizer: bytes, or the path of a tokenizer.json or of its folder")
      ->capture_default_str();
  app.add_option("--layout", layout_name, "Layout of the output file")
      ->check(one_of({"llm.c", "nanogpt", "megatron"}))
      ->capture_default_str();
  app.add_flag("--append-end-of-text", append_end,
               "Append the tokenizer's end-of-text token to each document");
  app.add_flag("--force", force, "Replace an existing output file");
  if (const auto status = parse(app, "data pack",
                                "Converts text to one file of token ids. Each text file, or each "
                                "record with text in a .jsonl file, is one document.\nUsage: "
                                "lockstep data pack --input PATH --output FILE "
                                "[OPTIONS]\n",
                                arguments))
    return *status;

  const auto start = Clock::now();
  const data::TokenLayout layout = data::token_layout(layout_name);
  check_output(output, layout, force);
  const auto tokenizer = data::Tokenizer::open(tokenizer_name);
  std::optional<int32_t> end;
  if (append_end) {
    end = tokenizer.end_of_text();
    if (!end) {
      throw ConfigError(
          format("data pack: tokenizer {} has no end-of-text token; leave --append-end-of-text out",
                 tokenizer_name));
    }
  }
  const data::DataFiles files = data::find_data_files(input);
  if (const auto found = std::find_if(files.paths.begin(), files.paths.end(), data::is_token_file);
      found != files.paths.end()) {
    throw ConfigError(format("data pack: {} has token ids already; --input must be text", *found));
  }
  data::TokenFileWriter writer(output, layout, tokenizer.vocab_size() <= 65536 ? 2 : 4);
  const auto end_document = [&] {
    if (end) writer.write(std::span(&*end, 1));
    writer.end_document();
  };
  data::JsonLines records;
  for (const std::string& path : files.paths) {
    if (data::is_json_lines_file(path)) {
      pack_records(
          path, records,
          [&](std::span<const int32_t> tokens) {
            writer.write(tokens);
            end_document();
          },
          tokenizer);
      continue;
    }
    pack_file(path, tokenizer, writer);
    end_document();
  }
  writer.finish();
  if (files.binary + files.unreadable > 0) {
    std::cerr << format("data pack: skipped {} and {}\n", counted(files.binary, "binary file"),
                        counted(files.unreadable, "unreadable file"));
  }
  std::cout << format("{}: {}, {}, {} bytes, {:.2f} seconds\n", output,
                      counted(writer.documents(), "document"), counted(writer.tokens(), "token"),
                      fs::file_size(output), seconds_since(start));
  return 0;
}

}  // namespace

int data(const Words& arguments) {
  if (!arguments.empty() && arguments[0] == "pack") {
    return pack(Words(arguments.begin() + 1, arguments.end()));
  }
  if (!arguments.empty() && (arguments[0] == "--help" || arguments[0] == "-h")) {
    std::cout << "Converts text to files of token ids.\n"
                 "Usage: lockstep data pack --input PATH --output FILE [OPTIONS]\n";
    return 0;
  }
  throw ConfigError(format("data: unknown subcommand '{}'; use lockstep data pack",
                           arguments.empty() ? "" : arguments[0]));
}

}  // namespace lockstep::cli

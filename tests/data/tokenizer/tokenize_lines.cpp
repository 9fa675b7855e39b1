// SPDX-License-Identifier: Apache-2.0
// Encodes lines for tests that compare with another tokenizer.
//
// usage: tokenize_lines TOKENIZER [--decode] < strings > ids
//
// Each line in is a JSON string, or a JSON array of bytes for what is not UTF-8; each line out is a
// JSON array of ids. Ends with status 1 where decoding does not give the string back. With
// --decode, for tokenizers that change the text, each line out is the ids and what they decode to.
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/tokenizer/tokenizer.h"

namespace {

std::string text_of(const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  const auto bytes = value.get<std::vector<unsigned char>>();
  return {bytes.begin(), bytes.end()};
}

int run(const char* name, bool decodes) {
  const auto tokenizer = lockstep::data::Tokenizer::open(name);
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto text = text_of(nlohmann::json::parse(line));
    const auto tokens = tokenizer.encode(text);
    const auto decoded = tokenizer.decode(tokens);
    if (decodes) {
      std::cout << nlohmann::json{tokens, decoded}.dump(-1, ' ', /*ensure_ascii=*/true) << '\n';
      continue;
    }
    if (decoded != text) {
      std::cerr << "tokenize_lines: " << line << " is not what its tokens decode to\n";
      return 1;
    }
    std::cout << nlohmann::json(tokens) << '\n';
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool decodes = argc == 3 && std::string_view(argv[2]) == "--decode";
  if (argc != 2 && !decodes) {
    std::cerr << "usage: tokenize_lines TOKENIZER [--decode] < strings > ids\n";
    return 2;
  }
  try {
    return run(argv[1], decodes);
  } catch (const std::exception& error) {
    std::cerr << "tokenize_lines: " << error.what() << '\n';
    return 1;
  }
}

// SPDX-License-Identifier: Apache-2.0
// Encodes lines for tests that compare with another tokenizer.
//
// usage: tokenize_lines TOKENIZER [--adds-space] < strings > ids
//
// Each line in is a JSON string, or a JSON array of bytes for what is not UTF-8; each line out is a
// JSON array of ids. Ends with status 1 where decoding does not give the string back, unless the
// tokenizer is said to add a space before words.
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

int run(const char* name, bool adds_space) {
  const auto tokenizer = lockstep::data::Tokenizer::open(name);
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto text = text_of(nlohmann::json::parse(line));
    const auto tokens = tokenizer.encode(text);
    if (!adds_space && tokenizer.decode(tokens) != text) {
      std::cerr << "tokenize_lines: " << line << " is not what its tokens decode to\n";
      return 1;
    }
    std::cout << nlohmann::json(tokens) << '\n';
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool adds_space = argc == 3 && std::string_view(argv[2]) == "--adds-space";
  if (argc != 2 && !adds_space) {
    std::cerr << "usage: tokenize_lines TOKENIZER [--adds-space] < strings > ids\n";
    return 2;
  }
  try {
    return run(argv[1], adds_space);
  } catch (const std::exception& error) {
    std::cerr << "tokenize_lines: " << error.what() << '\n';
    return 1;
  }
}

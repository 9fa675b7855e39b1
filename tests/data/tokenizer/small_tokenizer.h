// SPDX-License-Identifier: Apache-2.0
// A tokenizer.json without merges: 256 tokens of one byte each, some that nothing becomes, and
// <|endoftext|>.
#pragma once

#include <string>

#include "tests/support/subprocess.h"

namespace lockstep::test {

inline std::string utf8(int code_point) {
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xc0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3f))};
}

// Writes it to `path`, with `end_of_text` (256 or more) as that token's id.
inline void write_small_tokenizer(const std::string& path, int end_of_text) {
  std::string vocab;
  int moved = 256;  // printable bytes stand for themselves, the others for letters from here on
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    const std::string symbol = utf8(printable ? byte : moved++);
    const bool escaped = symbol == "\"" || symbol == "\\";
    vocab += (byte == 0 ? "\"" : ",\"") + std::string(escaped ? "\\" : "") + symbol +
             "\":" + std::to_string(byte);
  }
  for (int id = 256; id < end_of_text; ++id) {
    vocab += ",\"unused" + std::to_string(id) + "\":" + std::to_string(id);
  }
  write_file(
      path,
      R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"content":"<|endoftext|>","id":)" +
          std::to_string(end_of_text) +
          R"(,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],)"
          R"("normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,)"
          R"("trim_offsets":true,"use_regex":true},"post_processor":null,"decoder":{"type":)"
          R"("ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},)"
          R"("model":{"type":"BPE","dropout":null,"unk_token":null,)"
          R"("continuing_subword_prefix":"","end_of_word_suffix":"","fuse_unk":false,"vocab":{)" +
          vocab + R"(},"merges":[]}})");
}

}  // namespace lockstep::test

// Lets the model that train.cpp has saved write: generate letters.pt [WORD...]
//
// All words are decoded at once, token by token, on a cache of keys and values. Exits with 1 if the
// model writes anything else without a cache.
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "letters.h"

using Words = std::vector<std::string>;

Tensor tokens_of(const std::string& word) {
  std::vector<int64_t> tokens;
  for (const char letter : word) tokens.push_back(letter - 'a');
  tokens.push_back(kSort);
  return torch::tensor(tokens);
}

// The letters up to the first token that is none.
std::string letters_of(const Tensor& tokens) {
  std::string text;
  for (int64_t i = 0; i < tokens.size(0) && tokens[i].item<int64_t>() < kLetters; ++i)
    text += static_cast<char>('a' + tokens[i].item<int64_t>());
  return text;
}

// What was written behind B prompts: N tokens each, and the logits from which they were chosen.
struct Written {
  Tensor tokens;  // [N, B]
  Tensor logits;  // [N, B, kTokens]
};

Written write_with_cache(Letters& model, const Words& words) {
  std::vector<Tensor> prompts, lengths;
  for (const std::string& word : words) {
    prompts.push_back(tokens_of(word));
    lengths.push_back(torch::tensor(prompts.back().size(0)));
  }
  // The prompts are read in one call, the shorter ones padded. As attention is causal, no token
  // sees the padding behind it; and with its own length set, each text goes on where its prompt
  // ends, so that the padding in the cache is overwritten.
  Cache cache(words.size());
  const Tensor read = model->append(nn::utils::rnn::pad_sequence(prompts, false, kEnd), cache);
  cache.lengths = torch::stack(lengths);
  const Tensor last = (cache.lengths - 1).view({1, -1, 1}).expand({1, -1, kTokens});

  std::vector<Tensor> logits{read.gather(0, last)};  // [1, B, kTokens], as all that follow
  std::vector<Tensor> tokens{logits.back().argmax(-1)};
  for (int64_t i = 0; i < kLongestWord; ++i) {
    logits.push_back(model->append(tokens.back(), cache));
    tokens.push_back(logits.back().argmax(-1));
  }
  return {torch::cat(tokens), torch::cat(logits)};
}

// Whether the model chooses the same when it reads all that comes before each token, without a
// cache. As attention is causal, one call reads for all tokens.
bool is_the_same_without_cache(Letters& model, const std::string& word, const Tensor& tokens,
                               const Tensor& logits) {
  const Tensor prompt = tokens_of(word);
  const Tensor text = torch::cat({prompt, tokens.slice(0, 0, -1)});
  const Tensor again = model(text.unsqueeze(1)).squeeze(1).slice(0, prompt.size(0) - 1);
  return letters_of(again.argmax(-1)) == letters_of(tokens) &&
         (again - logits).abs().max().item<double>() < 1e-3;
}

bool is_word(const std::string& word) {
  return !word.empty() && word.size() <= kLongestWord &&
         word.find_first_not_of("abcdefghijklmnopqrstuvwxyz") == std::string::npos;
}

int main(int argc, char** argv) {
  Words words(argv + std::min(argc, 2), argv + argc);
  if (words.empty()) words = {"query", "key", "value", "softmax", "phone", "background"};
  if (argc < 2 || !std::all_of(words.begin(), words.end(), is_word)) {
    std::cerr << "usage: generate FILE [WORD...], with words of 1 to " << kLongestWord
              << " different small letters\n";
    return 2;
  }
  torch::NoGradGuard guard;  // attention_with_kvcache is for inference
  Letters model;
  torch::load(model, argv[1]);
  model->eval();

  const Written written = write_with_cache(model, words);
  for (size_t i = 0; i < words.size(); ++i) {
    const Tensor tokens = written.tokens.select(1, i), logits = written.logits.select(1, i);
    std::cout << words[i] << ">" << letters_of(tokens) << "\n";
    if (!is_the_same_without_cache(model, words[i], tokens, logits)) {
      std::cout << "Without a cache the model writes something else.\n";
      return 1;
    }
  }
  return 0;
}

// Lets the model that train.cpp has saved write: generate letters.pt [WORD...]
//
// All words are decoded at once, token by token, on a cache of keys and values. Exits with 1 if
// reading the whole text again for each token, without a cache, writes anything else.
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

Words write_with_cache(Letters& model, const Words& words) {
  std::vector<Tensor> prompts, lengths;
  for (const std::string& word : words) {
    prompts.push_back(tokens_of(word));
    lengths.push_back(torch::tensor(prompts.back().size(0)));
  }
  // The prompts are read in one call, the shorter ones padded. As attention is causal, no token
  // sees the padding behind it; and with its own length set, each text goes on where its prompt
  // ends, so that the padding in the cache is overwritten.
  Cache cache(words.size());
  const Tensor logits =
      model->append(nn::utils::rnn::pad_sequence(prompts, false, kEnd), cache);  // [L, B, kTokens]
  cache.lengths = torch::stack(lengths);
  Tensor next = logits.argmax(-1).gather(0, cache.lengths.unsqueeze(0) - 1);  // [1, B]

  std::vector<Tensor> written{next};
  for (int64_t i = 0; i < kLongestWord; ++i) {
    next = model->append(next, cache).argmax(-1);
    written.push_back(next);
  }
  Words texts;
  for (const Tensor& text : torch::cat(written).unbind(1)) texts.push_back(letters_of(text));
  return texts;
}

std::string write_without_cache(Letters& model, const std::string& word) {
  Tensor text = tokens_of(word);
  const int64_t prompt = text.size(0);
  for (int64_t i = 0; i <= kLongestWord; ++i) {
    const Tensor next = model(text.unsqueeze(1)).argmax(-1)[-1];
    text = torch::cat({text, next});
  }
  return letters_of(text.slice(0, prompt));
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

  const Words written = write_with_cache(model, words);
  for (size_t i = 0; i < words.size(); ++i) {
    std::cout << words[i] << ">" << written[i] << "\n";
    const std::string again = write_without_cache(model, words[i]);
    if (again != written[i]) {
      std::cout << "without a cache it is " << again << "\n";
      return 1;
    }
  }
  return 0;
}

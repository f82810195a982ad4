# Of examples/cpp, for a build of one or two of the programs: CMAKE_PROJECT_qkv_examples_INCLUDE.
# The precompiled header takes as long as three programs. What it shows, that qkv's headers need
# nothing before them, phone_book shows then.
set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)
cmake_language(DEFER CALL target_compile_options phone_book PRIVATE "SHELL:-include qkv/nn.h")

// The ranks that the launcher started, one line for each.
int say_ranks();

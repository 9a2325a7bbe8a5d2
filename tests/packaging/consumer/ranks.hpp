// Who the launcher started, one line for each rank.
int say_ranks();

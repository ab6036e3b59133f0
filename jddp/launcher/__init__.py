"""What starts the processes of a job, watches them and starts them again."""

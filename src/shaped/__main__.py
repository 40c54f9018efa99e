from shaped.cli import main

main()
